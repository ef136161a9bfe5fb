"""Exceptions as one message that a user can act on, and an exit code."""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import os
import re
import shlex
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lit_rl.cli.aliases import check_spaces, of_other_choices
from lit_rl.cli.listing import neighbouring_keys, no_choice_message
from lit_rl.cli.typed_words import ambiguous
from lit_rl.core import other_names, signals, upstream
from lit_rl.core.durable_files import is_failing, is_full
from lit_rl.core.errors import (
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
        key = "run_dir" if Path(word).is_dir() else "data.path" if Path(word).is_file() else ""
        meant = f" Did you mean {key}={word}?" if key else ""
        raise ConfigError(f"{word!r} is not a setting: settings are written key=value.{meant}")
    near = did_you_mean(word, commands)
    raise ConfigError(f"{word!r} is neither a command nor key=value.{near} Commands: {', '.join(commands)}.")


def refuse_late_command(command: str, words: Sequence[str]) -> int:
    """Refuse a command behind its options."""
    rest = shlex.join(word for word in words if word != command)
    raise ConfigError(f"{command} is a command and comes before its options: lit-rl {command} {rest}")


def report_errors(function: Callable[[], int | None]) -> int:
    """Call a function; turn errors into a message on stderr and the exit code of their class.

    `LIT_RL_TRACEBACK=1` shows the traceback too. Anything that is not ours keeps its traceback: it is our defect.
    """
    signals.forget_requeue()
    try:
        return function() or 0
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        return INTERRUPTED
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except Exception as error:
        if (requeued := signals.exit_code_of_requeue()) is not None:
            return requeued
        ours = as_lit_rl_error(error)
        if ours is None:
            traceback.print_exc()
            return 1
        if os.environ.get("LIT_RL_TRACEBACK"):
            traceback.print_exc()
        from lit_rl.callbacks.display import escape_control

        said = [*getattr(ours, "__notes__", ()), *(getattr(error, "__notes__", ()) if ours is not error else ())]
        notes = "".join(f" {note}" for note in said)
        sys.stderr.write(escape_control(f"{type(ours).__name__}: {ours}{notes}") + "\n")
        return ours.exit_code


def describe(error: BaseException) -> dict[str, Any]:
    """Return the record of an error that ended a run: for people, and for programs that restart jobs."""
    ours = as_lit_rl_error(error)
    return {
        "error": type(ours or error).__name__,
        "message": str(ours or error),
        "exit_code": exit_code_of(error),
        "host": socket.gethostname(),
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "traceback": "".join(traceback.format_exception(error)),
    }


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an error."""
    ours = as_lit_rl_error(error)
    return ours.exit_code if ours else 1


def as_lit_rl_error(error: BaseException) -> LitRLError | None:
    """Return the error as one of ours, or None where it is a defect."""
    if isinstance(error, LitRLError):
        return error
    for handler in (_hydra, _yaml, of_other_processes, _lightning, _memory, _full_disk, _failing_disk, _long_name):
        if (ours := handler(error)) is not None:
            return ours
    return None


# ---------------------------------------------------------------------- Hydra, OmegaConf and YAML


def _yaml(error: BaseException) -> LitRLError | None:
    import yaml

    if isinstance(error, yaml.YAMLError):
        tab = " Indent YAML with spaces, not with tabs." if "'\\t' that cannot start" in str(error) else ""
        return ConfigError(f"A config file is not plain YAML (tags that make objects are refused): {error}{tab}")
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
            if (choices := of_other_choices(key)) and not other_names.meaning(key):
                return other_names.not_a_key(key, choices)
            near = did_you_mean(name, names) or _elsewhere(link)
            return other_names.unknown_key(key, beside=f"{near}{neighbouring_keys(head, name, names)}")
        if isinstance(link, ValidationError) and link.full_key:
            reason = str(link).split("\n")[0]
            if link.full_key == "data.path" and "'list'" in reason:
                from lit_rl.data.sources import SEVERAL_PATHS  # here: it loads the readers of files

                return ConfigError(SEVERAL_PATHS)
            return _of_its_type(link, reason)
        if isinstance(link, MissingConfigException) and link.options:
            wrong = re.search(r"Could not find '([^']+)'", str(link))
            group, _, choice = (wrong.group(1) if wrong else "").rpartition("/")
            return ConfigError(no_choice_message(group, choice, [option for option in link.options if option != "_"]))
    if isinstance(error, ValueError) and str(error).startswith("Config group override must be"):
        return ConfigError(
            f"A group takes the name of a choice, and one of the arguments is not key=value, or its value is not a "
            f"name: {error}."
        )
    if isinstance(error, ValueError) and str(error).startswith("Unable to configure"):  # logging, of its own factories
        error = next((link for link in chain if isinstance(link, HydraException)), error)
    if isinstance(error, ValueError) and str(error).startswith("The --resolve flag"):
        return _of_command_line(str(error))
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        ours = _user_yaml(chain)
        said = next((str(link) for link in chain if str(link)), type(error).__name__)
        return _of_command_line(said) if ours is None else ConfigError(str(ours))
    return None


_REWORDED = {
    r"In '([^']+)': Could not override '([^'@]+)@[^']+'": (
        "{0}.yaml: its first line must be `# @package _global_`, so that its keys and `override /{1}` apply to the "
        "whole config."
    ),
    r"In 'experiment/([^']+)': Could not find 'experiment/([^'/]+)/([^']+)'": (
        "experiment/{0}.yaml: its defaults list includes {1}: {2} as a file of its own. To choose another {1}, write "
        "`- override /{1}: {2}`."
    ),
    r"Could not override '@?([\w/]+)@?'.*No match in the defaults.*use \+(?:@\w|\w+@)": (
        "A choice is typed without an @: {0}=NAME."
    ),
    r"The (--\w+) flag can only be used": "{0} is an option of --cfg: type --cfg job {0}.",
    r"Could not override ''": (
        "An argument begins with =: settings are written key=value, without a space before the =."
    ),
    r"Could not append to config\. An item is already at '([^']+)'": (
        "+{0}=... would add a key, and {0} exists already. Type {0}=..., without the +."
    ),
    r"Interpolation key '([^']+)' not found.*full_key: (\S+)": (
        "{1} refers to ${{{0}}}, and there is no key {0}. Write the whole key, such as ${{data.path}}."
    ),
    r"Interpolation key '([^']+)' not found": "A value refers to ${{{0}}}, and there is no key {0}.",
    r"Environment variable '([^']+)' not found.*full_key: (\S+)": (
        "{1} refers to the environment variable {0}, which is not set. Type export {0}=VALUE before the command, or "
        "give a default: ${{oc.env:{0},DEFAULT}}."
    ),
    r"Environment variable '([^']+)' not found": (
        "A value refers to the environment variable {0}, which is not set. Type export {0}=VALUE before the command, "
        "or give a default: ${{oc.env:{0},DEFAULT}}."
    ),
    r"Error merging override ([^=\s]+)='(.*\$\{.*)'": (
        "{0}={1}: ${{ begins a reference, such as ${{data.path}}, and this one is not closed or cannot be parsed. "
        "Write a literal $ as \\$."
    ),
    r"(no viable alternative at input '\$\{{?.*?')\s+full_key: (\S+)": (
        "{1} begins a reference, ${{...}}, that is not closed or cannot be parsed ({0}). Write a literal $ as \\$."
    ),
    r"^((?:mismatched|extraneous|missing|no viable|token recognition)[^\n]*)": (
        "An argument cannot be parsed as key=value ({0}). Quote a value with characters other than letters, digits "
        "and ./:-, as in 'key=\"a text\"'."
    ),
    r"Cannot find primary config '([^']+)'": (
        "--config-name {0}: the package has no config of this name. To use {0}.yaml of your own, put it into "
        "FOLDER/experiment/ and type --config-dir FOLDER experiment={0}."
    ),
    r"Primary config module '\S+' not found": (
        "--config-path would replace the whole config. To add a folder of your own, type --config-dir FOLDER."
    ),
    r"Additional config directory '([^']+)' not found": (
        "--config-dir: there is no folder {0}. Give a folder with groups in it, such as FOLDER/experiment/mine.yaml."
    ),
}
"""Messages of Hydra and OmegaConf as patterns, each with ours in its place, with the groups of the pattern."""

_KINDS = {"Integer": ("whole number", "1"), "Float": ("number", "0.1"), "bool": ("switch", "true")}
"""OmegaConf's name for the type of a key, people's name for it, and one of its values."""


def _of_its_type(error: Any, reason: str) -> ConfigError:
    """Return the error about a value of another type than its key has: the key, the value, and the words to type.

    Args:
        error: Of OmegaConf, which knows the key and what stands there.
        reason: The first line that it says.
    """
    followed = re.match(r"While dereferencing interpolation '\$\{([\w.]+)\}': (.*)", reason, re.DOTALL)
    key, reason = (followed[1], followed[2]) if followed else (str(error.full_key), reason)
    group = None if followed else error.parent_node
    default, optional = upstream.value_and_optional(group, key.rpartition(".")[2])
    nothing = re.search(r"is not Optional|Incompatible value 'None'", reason)
    wrong = re.search(
        r"Value '(.*)' (?:of type '(\w+)' could not be converted to (Integer|Float)|is not a valid (bool))",
        reason,
        re.DOTALL,
    )
    if nothing:
        shown = "" if default is None else f": its default is {default!s:.80}"
        return ConfigError(f"{key}=null: it cannot be null{shown}. Type {key}=VALUE, or leave it out.")
    if wrong is None:
        return ConfigError(f"{key}: {reason}.")
    value, came, kind = wrong[1], wrong[2], wrong[3] or wrong[4]
    what, such = _KINDS[kind]
    typed = [word.partition("=")[2] for word in sys.argv if word.lstrip("+").startswith(f"{key}=")]
    value = typed[-1] if typed else value  # the last one counts
    example = such if default is None or isinstance(default, str) else str(default).lower()
    if not value:
        return ConfigError(
            f"{key}= has no value after the =. It takes a {what}: type {key}={example}, or leave it out for its "
            "default."
        )
    if kind == "Integer" and came == "float" and float(wrong[1]).is_integer():
        whole = int(float(wrong[1]))
        return ConfigError(
            f"{key}={value}: it takes a whole number, without a point or an exponent. Type {key}={whole}."
        )
    nothing = f" To set nothing, type {key}=null." if optional and value.lower() in ("none", "nil", "~") else ""
    one = "true or false" if kind == "bool" else f"one, such as {key}={example}"
    return ConfigError(f"{key}={value} is not a {what}: type {one}.{nothing}")


def _of_command_line(text: str) -> ConfigError:
    """Return Hydra's error about an argument of the command line in our words; others stay."""
    if comma := re.match(r"Ambiguous value for argument '(.*)'\n1\. ", text, re.DOTALL):
        return ambiguous(comma[1])
    if removed := re.match(r"Error merging override ~([^\s=]+)", text):
        key = removed[1]
        return ConfigError(
            f"~{key} would remove {key}, a setting that is always there. Leave it out for its default, or type "
            f"{key}=VALUE ({key}=null where it may be null)."
        )
    for pattern, reworded in _REWORDED.items():
        if found := re.search(pattern, text, re.DOTALL):
            return ConfigError(reworded.format(*found.groups()))
    if wrong := re.match(r"Could not override '(?:.*@)?([^'@]+)/([^'/@]+)'.*No match in the defaults", text, re.DOTALL):
        group, part = wrong.groups()
        return ConfigError(
            f"{group}/{part} has no effect here: the {group} of this run has no {part}. Leave it out, or choose "
            f"another {group}."
        )
    return ConfigError(re.split(r"\n\s*(?:full_key|object_type|Config search path)\b|\nSee https", text)[0].strip())


def _user_yaml(chain: Iterable[BaseException]) -> LitRLError | None:
    return next((ours for link in chain if (ours := _yaml(link)) is not None), None)


def _siblings(link: Any) -> list[str]:
    """Return the keys beside the unknown one."""
    if link.parent_node is not None:
        return sorted(str(name) for name in link.parent_node if not str(name).startswith("_"))
    import dataclasses

    if dataclasses.is_dataclass(link.object_type):
        return sorted(f.name for f in dataclasses.fields(link.object_type) if not f.name.startswith("_"))
    return []


def _elsewhere(link: Any) -> str:
    """Return the key of the nearest name in the whole config, for a key in the wrong place."""
    keys = {} if link.parent_node is None else upstream.keys_of_groups(link.parent_node)
    near = nearest(str(link.full_key).rpartition(".")[2], keys)
    return f" Did you mean {keys[near]!r}?" if near else ""


# ---------------------------------------------------------------------- Lightning, memory and disks


def _lightning(error: BaseException) -> LitRLError | None:
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    text = re.sub(r"`Trainer\((\w+)='?(.*?)'?\)`(?: value)?", r"trainer.\1=\2", str(error))
    if timer := re.match(r"`Timer\(duration='?(.*?)'?\)`(.*)", text):
        text = f"trainer.max_time={timer[1]}{timer[2]}"
    if text.startswith("When passing string value for the `profiler`"):
        text = f"trainer.profiler: allowed is {text.partition('[')[2].strip(']')}."
    if "selected an invalid" in text and _from_lightning(error):  # a word that no machine knows
        return ConfigError(text)
    if isinstance(error, RuntimeError) and "conditioned on metric" in text:  # EarlyStopping's own class of error
        return ConfigError(text)
    if isinstance(error, MisconfigurationException):
        away = ("accelerator", "GPU", "CUDA", "device", "precision", "backend", "deepspeed")
        if text.startswith("No supported gpu backend"):
            return no_gpu_error("gpu")
        if "monitor" not in text and any(word in text for word in away):
            return BackendError(text)
        return ConfigError(text)
    if isinstance(error, (ValueError, ModuleNotFoundError)) and _from_lightning(error):
        return BackendError(text)
    return None


def _from_lightning(error: BaseException) -> bool:
    """Tell whether Lightning itself refused: its connectors raise ValueError for devices that the machine lacks."""
    frames = traceback.extract_tb(error.__traceback__)
    where = frames[-1].filename if frames else ""
    return "lightning" in where and ("connectors" in where or isinstance(error, ModuleNotFoundError))


def _memory(error: BaseException) -> LitRLError | None:
    """Return the out-of-memory error outside of a training, which explains more (`lit_rl.runs.step_memory`)."""
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
    return StorageError(f"The disk is full: {error}. Free some space, and resume with ckpt_path=last.")


def _failing_disk(error: BaseException) -> LitRLError | None:
    if not is_failing(error):
        return None
    return StorageError(
        f"The disk, or the server of this folder, has failed: {error}. What was saved before is unchanged: resume with "
        "ckpt_path=last once the disk works again."
    )


def _long_name(error: BaseException) -> LitRLError | None:
    if not isinstance(error, OSError) or error.errno != errno.ENAMETOOLONG:
        return None
    return ConfigError(f"The name of a file or folder is too long for its disk: {str(error.filename)[:100]!r}...")


def _chain(error: BaseException) -> Iterable[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


# ---------------------------------------------------------------------- other processes of a run


_GO_ON = (
    "If it ended by itself, the last lines that it printed say why; if it printed nothing, it was killed, as the "
    "kernel does when memory runs out. Once that is fixed, start the same command on every node with ckpt_path=last to "
    "resume the run from its newest checkpoint."
)

_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""Messages of gloo and NCCL, where a process at the other end is gone; they raise a RuntimeError."""


def has_lost_another(error: BaseException) -> bool:
    """Tell whether the error is about the loss of another process, and not about this one."""
    ours = isinstance(error, LitRLError)
    return isinstance(error, RuntimeError) and not ours and any(words in str(error) for words in _LOST)


def of_other_processes(error: BaseException) -> LitRLError | None:
    """Return the error as one of ours, or None where it is another one."""
    from torch.distributed import DistError

    text = str(error)
    if isinstance(error, ValueError) and text.startswith("You set `devices="):  # Lightning, of what a launcher started
        return ConfigError(text.replace("`devices=", "`trainer.devices=").replace("`num_nodes=", "`trainer.num_nodes="))
    of_gloo = isinstance(error, RuntimeError) and not isinstance(error, LitRLError) and "gloo" in text
    if not (of_gloo or isinstance(error, DistError) or has_lost_another(error)):
        return None
    meet = f"{os.environ.get('MASTER_ADDR', 'MASTER_ADDR')}:{os.environ.get('MASTER_PORT', 'MASTER_PORT')}"
    said = _first_words(text)
    if "EADDRINUSE" in text:
        return BackendError(
            f"The processes of the run would meet at {meet}, and that port is taken. Set another MASTER_PORT."
        )
    if "waiting for clients" in text or "failed to connect" in text:
        return BackendError(
            f"Not every process of the run reached {meet}, where they meet: {said}. Look at what the others printed, "
            "and check that all nodes can reach that address."
        )
    where = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", text)
    which = f"Another process of the run, at {where.group(1)}," if where else "Another process of the run"
    return BackendError(f"{which} has ended, or does not answer: {said}. {_GO_ON}")


def one_has_ended(how: str, killed: bool, folder: Path | None, error: BaseException) -> BackendError:
    """Return the error for a lost connection where the end of the other process is known.

    Args:
        how: A clause with its rank.
        killed: True if a signal killed it; else it printed its own reason.
        folder: Folder of the run, where there is a checkpoint to resume from.
        error: Error of the connection.
    """
    reason = "" if killed else " The last lines that it printed say why."
    again = "Start the same command again"
    if folder is not None:
        where = shlex.join(["ckpt_path=last", f"run_dir={folder}"])
        again = f"Start the same command with {where} to resume the run from its newest checkpoint"
    return BackendError(f"{how}.{reason} {again}. What torch.distributed said: {_first_words(str(error))}.")


def _first_words(text: str) -> str:
    return " ".join(text.partition("This is typically caused")[0].split("\n")[0].split()).rstrip(".")


# ---------------------------------------------------------------------- a GPU that PyTorch cannot see


_GPUS = ("gpu", "cuda")

_DRIVERS = ("/proc/driver/nvidia", "/dev/dxg")
"""Paths of NVIDIA's driver: on Linux, and in WSL."""


def check_accelerator(accelerator: object) -> None:
    """Refuse a GPU where there can be none: on Linux, PyTorch built without one, or built for CUDA without its driver;
    and Apple's. Any other fault is left to Lightning.

    Args:
        accelerator: `trainer.accelerator`.

    Raises:
        BackendError: the same error as when Lightning looks for one.
    """
    if sys.platform != "linux":
        return
    if accelerator == "mps" or (accelerator in _GPUS and _none_can_be_seen(_built())):
        raise no_gpu_error(str(accelerator))


def no_gpu_error(accelerator: str) -> BackendError:
    """Return the error where there is no GPU."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if seen is None or accelerator not in _GPUS else f" with CUDA_VISIBLE_DEVICES={seen!r}"
    return BackendError(
        f"trainer.accelerator={accelerator}, and PyTorch sees no GPU{hidden}: set trainer.accelerator=auto or cpu. "
        "`lit-rl env` lists the devices."
    )


def _none_can_be_seen(built: dict[str, bool]) -> bool:
    """Tell from PyTorch's build that it sees no GPU. CUDA's calls go to the driver's library, and without it there is
    no device; since PyTorch may find one that we do not (NixOS), the driver must be absent too."""
    if not {"cuda", "hip"} <= built.keys() or built["hip"]:
        return False
    there = _can_be_loaded("libcuda.so.1") or any(map(os.path.exists, _DRIVERS))
    return not built["cuda"] or not there


def _built() -> dict[str, bool]:
    """Return the device that the installed PyTorch was built for, from its `version.py`, which is not run; empty where
    that is unknown."""
    try:
        file = importlib.metadata.distribution("torch").locate_file("torch/version.py")
        text = Path(str(file)).read_text(encoding="utf-8")
    except (OSError, importlib.metadata.PackageNotFoundError):
        return {}
    lines = re.findall(r"^(cuda|hip)\b[^=\n]*= *(\S.*)$", text, re.MULTILINE)
    return {name: value.strip() != "None" for name, value in lines}


def _can_be_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
