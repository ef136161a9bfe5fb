"""Keys and tokens in typed settings are refused: others can read them there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lit_rl.core.errors import ConfigError
from lit_rl.reports.secrets import is_secret_name, secret_in

_OF_COLUMNS = ".rename."
"""Keys below it are names of a user's columns: of `data`, and of each of its sources."""
_TYPED = "everybody on this machine sees them in the list of processes, and they stay in the shell's history"


def check_typed_secrets(words: Sequence[str]) -> None:
    """Refuse a secret on the command line, before anything else is printed or written.

    Args:
        words: Settings, options and whatever else was typed.

    Raises:
        ConfigError: as `check_secrets`.
    """
    for word, after in zip(words, [*words[1:], ""]):
        name, equals, value = word.lstrip("+~-").partition("=")
        if not equals and word.startswith("-") and "=" not in after and not after.startswith("-"):
            value = after
        alone = secret_in(name)
        if what := alone or secret_kind(name, value):
            raise _refused("The command line" if alone else name, what, _TYPED)


def check_secrets(config: DictConfig) -> None:
    """Refuse a secret that stands in the settings as it is, and not as a reference to the environment.

    Args:
        config: As it was composed. A reference (`${oc.env:NAME}`) is not resolved, and is no secret.

    Raises:
        ConfigError: names the key and where the secret belongs, and does not repeat it.
    """
    for key, value in _values(OmegaConf.to_container(config, resolve=False)):
        if what := secret_kind(key, value):
            raise _refused(key, what, "they are written into the folders of runs, and given on")


def secret_kind(key: str, value: Any) -> str | None:
    """Return the kind of secret that a value looks like, in words; None where it looks like none.

    Args:
        key: Key of the setting.
        value: Of any type; a reference is no secret.
    """
    if isinstance(value, str) and (what := secret_in(value)):
        return what
    name = key.rpartition(".")[2]
    if (key.startswith("data.") and _OF_COLUMNS in key) or not is_secret_name(name, value):
        return None
    return f"the value of a key that is named {name}"


def _refused(key: str, what: str, why: str) -> ConfigError:
    hub = "Hugging Face" in what
    variable, read = ("HF_TOKEN", " lit_rl itself finds HF_TOKEN there, unnamed.") if hub else ("MY_KEY", "")
    return ConfigError(
        f"{key} holds what looks like a secret: {what}. Settings are no place for one: {why}. Allowed is a reference: "
        f"put it into an environment variable, and write '${{oc.env:{variable}}}' in its place.{read} If it is real, "
        "have it replaced where it was issued."
    )


def _values(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value, with its key; an entry of a list has the key of the list."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _values(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for value in node:
            yield from _values(value, key)
    else:
        yield key, node
