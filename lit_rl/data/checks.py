"""Small helpers that make a refusal readable."""

from __future__ import annotations

from collections.abc import Iterable

from lit_rl.errors import ConfigError, did_you_mean


def one_of(key: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a word that is not among the choices.

    Raises:
        ConfigError: names the key, the word and the choices.
    """
    choices = list(choices)
    if value not in choices:
        hint = did_you_mean(str(value), choices)
        raise ConfigError(f"{key}={value!r} is not a choice: allowed are {', '.join(choices)}.{hint}")


def excerpt(text: str, length: int = 80) -> str:
    """The first characters of a text on one line, with what a terminal would obey written as escapes."""
    head = text[:length]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in head)
