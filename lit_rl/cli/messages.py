"""From exceptions to one message a user can act on, and an exit code."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lit_rl.cli import accelerators
from lit_rl.cli.listing import no_choice, some_keys
from lit_rl.cli.other_processes import of_other_processes
from lit_rl.cli.other_words import check_spaces, meaning, no_key, of_other_choices
from lit_rl.cli.typed_values import ambiguous
from lit_rl.data.checks import SEVERAL_PATHS
from lit_rl.durable import is_failing, is_full
from lit_rl.errors import (
    INTERRUPTED,
    BackendError,
    ConfigError,
    LitRLError,
    StorageError,
    did_you_mean,
    is_out_of_memory,
    nearest,
)


def usage(words: Sequence[str], commands: Sequence[str]) -> int:
    """Refuse a command line whose first word is neither `key=value` nor one of these commands."""
    check_spaces(words)
    word = words[0]
    if not commands:
        folder = f" Did you mean run_dir={word}?" if Path(word).is_dir() else ""
        raise ConfigError(f"{word!r} is no setting: settings are written key=value.{folder}")
    near = did_you_mean(word, commands)
    raise ConfigError(f"{word!r} is neither a command nor key=value.{near} Commands: {', '.join(commands)}.")


def reported(function: Callable[[], int | None]) -> int:
    """Call it; turn what it raises into a message on stderr and the exit code of its class.

    `LIT_RL_TRACEBACK=1` shows the traceback too. Anything that is not ours keeps its traceback: it is our defect.
    """
    try:
        return function() or 0
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        return INTERRUPTED
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except Exception as error:
        ours = translated(error)
        if ours is None:
            traceback.print_exc()
            return 1
        if os.environ.get("LIT_RL_TRACEBACK"):
            traceback.print_exc()
        from lit_rl.callbacks.text import visible

        said = [*getattr(ours, "__notes__", ()), *(getattr(error, "__notes__", ()) if ours is not error else ())]
        notes = "".join(f" {note}" for note in said)
        sys.stderr.write(visible(f"{type(ours).__name__}: {ours}{notes}") + "\n")
        return ours.exit_code


def described(error: BaseException) -> dict[str, Any]:
    """What is written down of an error that ended a run: for people, and for what restarts jobs."""
    ours = translated(error)
    return {
        "error": type(ours or error).__name__,
        "message": str(ours or error),
        "exit_code": exit_code_of(error),
        "host": socket.gethostname(),
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "traceback": "".join(traceback.format_exception(error)),
    }


def exit_code_of(error: BaseException) -> int:
    """With which the process ends of it."""
    ours = translated(error)
    return ours.exit_code if ours else 1


def translated(error: BaseException) -> LitRLError | None:
    """The error as one of ours, or None where it is a defect."""
    if isinstance(error, LitRLError):
        return error
    for handler in (_hydra, _yaml, of_other_processes, _lightning, _memory, _full_disk, _failing_disk, _long_name):
        if (ours := handler(error)) is not None:
            return ours
    return None


def _yaml(error: BaseException) -> LitRLError | None:
    import yaml

    if isinstance(error, yaml.YAMLError):
        return ConfigError(f"A config file is not plain YAML (tags that make objects are refused): {error}")
    return None


def _hydra(error: BaseException) -> LitRLError | None:
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, (ConfigAttributeError, ConfigKeyError)) and link.full_key:
            key = str(link.full_key)
            names = _siblings(link)
            if not names:
                return ConfigError(f"{key} is not a key yet. To add it: +{key}=...")
            head, _, name = key.rpartition(".")
            near = did_you_mean(name, names) or _elsewhere(link)
            return no_key(key, meaning(key) or of_other_choices(key), f"{near}{some_keys(head, name, names)}")
        if isinstance(link, ValidationError) and link.full_key:
            reason = str(link).split("\n")[0]
            if link.full_key == "data.path" and "'list'" in reason:
                return ConfigError(SEVERAL_PATHS)
            return ConfigError(f"{link.full_key}: {reason}. See its type in: python train.py --cfg job")
        if isinstance(link, MissingConfigException) and link.options:
            wrong = re.search(r"Could not find '([^']+)'", str(link))
            group, _, choice = (wrong.group(1) if wrong else "").rpartition("/")
            return ConfigError(no_choice(group, choice, [option for option in link.options if option != "_"]))
    if isinstance(error, ValueError) and str(error).startswith("Config group override must be"):
        return ConfigError(
            f"A group takes the name of a choice, and one of the words is no key=value, or has another value: {error}."
        )
    if isinstance(error, ValueError) and str(error).startswith("Unable to configure"):  # logging, of its own factories
        error = next((link for link in chain if isinstance(link, HydraException)), error)
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        ours = _user_yaml(chain)
        return _of_words(str(error).split("\nfull_key")[0]) if ours is None else ConfigError(str(ours))
    return None


def _of_words(text: str) -> ConfigError:
    """Answer what Hydra says of a word of the command line in words of this project; what else it says stays."""
    if comma := re.match(r"Ambiguous value for argument '(.*)'\n1\. ", text, re.DOTALL):
        return ambiguous(comma[1])
    if removed := re.match(r"Error merging override ~([^\s=]+)", text):
        key = removed[1]
        return ConfigError(
            f"~{key} takes {key} away, and that is a setting that is always there. Leave the word out for its default, "
            f"or type {key}=VALUE ({key}=null where it may be nothing)."
        )
    if wrong := re.match(r"Could not override '(?:.*@)?([^'@]+)/([^'/@]+)'.*No match in the defaults", text, re.DOTALL):
        group, part = wrong.groups()
        return ConfigError(
            f"{group}/{part} chooses nothing here: the {group} of this run has no {part}. Leave it out, or take "
            f"another {group}."
        )
    return ConfigError(text)


def _user_yaml(chain: Iterable[BaseException]) -> LitRLError | None:
    return next((ours for link in chain if (ours := _yaml(link)) is not None), None)


def _siblings(link: Any) -> list[str]:
    """The keys that stand where the unknown one was looked for."""
    if link.parent_node is not None:
        return sorted(str(name) for name in link.parent_node if not str(name).startswith("_"))
    import dataclasses

    if dataclasses.is_dataclass(link.object_type):
        return sorted(f.name for f in dataclasses.fields(link.object_type) if not f.name.startswith("_"))
    return []


def _elsewhere(link: Any) -> str:
    """The key of the nearest name in the whole config, for a key that was looked for in the wrong place."""
    from omegaconf import OmegaConf

    root = link.parent_node._get_root() if link.parent_node is not None else None
    keys: dict[str, str] = {}
    for group, node in root.items_ex(resolve=False) if root is not None else ():
        for name in node if OmegaConf.is_dict(node) and not node._is_none() and not node._is_missing() else ():
            keys.setdefault(str(name), f"{group}.{name}")
    near = nearest(str(link.full_key).rpartition(".")[2], keys)
    return f" Did you mean {keys[near]!r}?" if near else ""


def _memory(error: BaseException) -> LitRLError | None:
    """Outside of a training, which says more (`lit_rl.commands.step_memory`)."""
    if not is_out_of_memory(error):
        return None
    return BackendError(
        f"Memory ran out: {' '.join(str(error).split())[:200] or type(error).__name__}. Take a smaller model, shorter "
        "texts (sampling.max_new_tokens, data.max_prompt_tokens), or fewer at once (generator.batch_size, "
        "data.val_batch_size)."
    )


def _full_disk(error: BaseException) -> LitRLError | None:
    if not is_full(error):
        return None
    return StorageError(f"The disk is full: {error}. Make room, and go on with ckpt_path=last.")


def _failing_disk(error: BaseException) -> LitRLError | None:
    if not is_failing(error):
        return None
    return StorageError(
        f"The disk, or the server whose folder it is, has failed: {error}. What was saved before is as it was: go on "
        "with ckpt_path=last once it is well again."
    )


def _long_name(error: BaseException) -> LitRLError | None:
    if not isinstance(error, OSError) or error.errno != errno.ENAMETOOLONG:
        return None
    return ConfigError(f"The name of a file or folder is too long for its disk: {str(error.filename)[:100]!r}...")


def _lightning(error: BaseException) -> LitRLError | None:
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    text = str(error)
    if "selected an invalid" in text and _from_lightning(error):  # a word that no machine knows
        return ConfigError(text)
    if isinstance(error, RuntimeError) and "conditioned on metric" in text:  # EarlyStopping's own class of error
        return ConfigError(text)
    if isinstance(error, MisconfigurationException):
        away = ("accelerator", "GPU", "CUDA", "device", "precision", "backend", "deepspeed")
        if text.startswith("No supported gpu backend"):
            return accelerators.no_gpu("gpu")
        if "monitor" not in text and any(word in text for word in away):
            return BackendError(text)
        return ConfigError(text)
    if isinstance(error, (ValueError, ModuleNotFoundError)) and _from_lightning(error):
        return BackendError(text)
    return None


def _from_lightning(error: BaseException) -> bool:
    """Whether Lightning itself refused: its connectors raise ValueError for what the machine does not have."""
    frames = traceback.extract_tb(error.__traceback__)
    where = frames[-1].filename if frames else ""
    return "lightning" in where and ("connectors" in where or isinstance(error, ModuleNotFoundError))


def _chain(error: BaseException) -> Iterable[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
