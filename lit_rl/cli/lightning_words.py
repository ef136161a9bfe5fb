"""Checks of LightningCLI's command line before torch loads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lit_rl.cli import typed_secrets
from lit_rl.cli.listing import neighbouring_keys, schema_keys
from lit_rl.cli.schemas import schema_versions
from lit_rl.core.errors import ConfigError, did_you_mean
from lit_rl.core.other_names import column, unknown_key

_CONFIG = ("--config", "-c")
_TRAINER = "--trainer."


def check(words: Sequence[str]) -> None:
    """Refuse a secret, a config file that is not there, and a key that the Trainer does not have.

    Raises:
        ConfigError: one of these, in the words in which jsonargparse's own error is reported.
    """
    command = next((word for word in words if word in ("fit", "validate", "test", "predict")), "fit")
    for before, word in zip(["", *words], words):
        if word != command and (not before.startswith("-") or "=" in before):
            _check_bare(word, command)
    for name, value in _options(words):
        _check_secret(name.lstrip("-"), value)
        if name in _CONFIG and value.endswith((".yaml", ".yml", ".json")) and not Path(value).expanduser().exists():
            near = [str(path) for path in Path(value).expanduser().parent.glob(f"*{Path(value).suffix}")]
            raise ConfigError(f"config: File does not exist: {value!r}.{did_you_mean(value, near)}")
        if name.startswith(_TRAINER):
            _check_key(name.removeprefix(_TRAINER))


def _check_bare(word: str, command: str) -> None:
    """Refuse a word that is neither an option nor the value of one."""
    if re.match(r"-[a-z]\w+", word):
        told = f"an option begins with two dashes: -{word}."
    elif word.startswith("-"):
        return
    elif "=" in word:
        told = (
            f"an option of lit-rl {command} begins with two dashes: --{word}. Settings without them, and the groups of "
            f"`lit-rl list`, are those of lit-rl train: lit-rl train {word}."
        )
    elif word.endswith((".yaml", ".yml", ".json")):
        told = f"a config file is --config {word}."
    else:
        told = f"it is no option of lit-rl {command}: they are --KEY VALUE, such as --config FILE."
    raise ConfigError(f"{word}: {told}")


def _check_secret(key: str, value: str) -> None:
    """Refuse a secret. jsonargparse has no references to the environment, so the message names a file that others may
    not read."""
    if not value.startswith("--") and typed_secrets.secret_kind(key, value):
        raise ConfigError(
            f"{key} holds what looks like a secret. A command line is no place for one: everybody on this machine sees "
            "it in the list of processes, and it stays in the shell's history. Put it into an environment variable "
            "that its reader knows (HF_TOKEN, WANDB_API_KEY, token_env=NAME of a reward's server), or into a --config "
            "that only you can read. If it is real, have it replaced where it was issued."
        )


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value, which stands in the same word or in the next."""
    for word, after in zip(words, [*words[1:], ""]):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            yield name, value if equals else after


def _check_key(key: str) -> None:
    keys = schema_keys()
    known = [name for name in keys["Trainer"] if not name.startswith("_")]
    name = key.rstrip("+").partition(".")[0]
    if keys["_versions_"] == schema_versions() and name not in known:
        raise no_such_key("trainer", name, known)


def no_such_key(head: str, name: str, names: Sequence[str]) -> ConfigError:
    """Return the message about an unknown key: the nearest one, and all that are beside it.

    Args:
        head: The key above; empty at the top.
        name: Name of the key, below that.
        names: Those that there are; none where that is not known.
    """
    key = f"{head}.{name}" if head else name
    if "speedups" in names and name in column("speedups"):
        return ConfigError(f"{key} is not a key. Did you mean '{head}.speedups.{name}'?")
    listed = neighbouring_keys(head, name, names, "lit-rl fit --help")
    return unknown_key(key, "fit", names, listed)
