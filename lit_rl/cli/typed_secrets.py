"""A key or a token that was written into the settings is refused: others can read it there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lit_rl.errors import ConfigError

_SECRET = re.compile(r"(?<![\w./-])(hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|Bearer [\w./+=-]{16,})(?![\w./-])")
"""By its form, and a word of its own: a part of a path is none."""
_KEY = re.compile(
    r"(^|[_-])(api[_-]?key|access_key|private_key|hf_token|auth_token|access_token|secret|password|authorization)$",
    re.IGNORECASE,
)


def check(config: DictConfig) -> None:
    """Refuse a secret that stands in the settings as it is, and not as a reference to the environment.

    Args:
        config: As it was composed. A reference (`${oc.env:NAME}`) is not resolved, and is no secret.

    Raises:
        ConfigError: names the key and where the secret belongs, and does not repeat it.
    """
    for key, text in _texts(OmegaConf.to_container(config, resolve=False)):
        if "${" in text:
            continue
        if not is_one(key, text):
            continue
        found = _SECRET.search(text)
        hub = found is not None and found[0].startswith("hf_")
        variable, read = ("HF_TOKEN", " lit_rl itself finds HF_TOKEN there, unnamed.") if hub else ("MY_KEY", "")
        raise ConfigError(
            f"{key} holds what looks like a secret. Settings are no place for one: everybody on this machine sees them "
            "in the list of processes, and they stay in the shell's history. Allowed is a reference: put it into an "
            f"environment variable, and write '${{oc.env:{variable}}}' in its place.{read} If it is real, have it "
            "replaced where it was issued."
        )


def is_one(key: str, text: str) -> bool:
    """Whether a text looks like a secret, by its form or by the name of its key."""
    return _SECRET.search(text) is not None or (bool(text) and _KEY.search(key.rpartition(".")[2]) is not None)


def _texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text, with its key; an entry of a list has the key of the list."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value, key)
    elif isinstance(node, str):
        yield key, node
