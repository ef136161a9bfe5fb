"""A key or a token that was written into the settings is refused: others can read it there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lit_rl.commands.secret_forms import in_words, is_named
from lit_rl.errors import ConfigError


def check(config: DictConfig) -> None:
    """Refuse a secret that stands in the settings as it is, and not as a reference to the environment.

    Args:
        config: As it was composed. A reference (`${oc.env:NAME}`) is not resolved, and is no secret.

    Raises:
        ConfigError: names the key and where the secret belongs, and does not repeat it.
    """
    for key, value in _values(OmegaConf.to_container(config, resolve=False)):
        what = kind_of(key, value)
        if what is None:
            continue
        hub = "Hugging Face" in what
        variable, read = ("HF_TOKEN", " lit_rl itself finds HF_TOKEN there, unnamed.") if hub else ("MY_KEY", "")
        raise ConfigError(
            f"{key} holds what looks like a secret: {what}. Settings are no place for one: everybody on this machine "
            "sees them in the list of processes, and they stay in the shell's history. Allowed is a reference: put it "
            f"into an environment variable, and write '${{oc.env:{variable}}}' in its place.{read} If it is real, have "
            "it replaced where it was issued."
        )


def kind_of(key: str, value: object) -> str | None:
    """What a value looks like by its form or by the name of its key, as the message says it; None: like no secret."""
    name = key.rpartition(".")[2]
    of_a_form = in_words(value) if isinstance(value, str) else None
    return of_a_form or (f"the value of a key that is named {name}" if is_named(name, value) else None)


def _values(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value, with its key; an entry of a list has the key of the list."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _values(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for value in node:
            yield from _values(value, key)
    else:
        yield key, node
