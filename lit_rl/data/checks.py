"""Small helpers that make a refusal readable."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lit_rl.errors import ConfigError, DataError, did_you_mean

_BEGINNINGS = {
    b"\x1f\x8b": "packed by gzip: unpack it first",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "packed by zstd: unpack it first",
    b"BZh91AY&SY": "packed by bzip2: unpack it first",
    b"PAR1\x15": "parquet: name it .parquet",
    b"\xff\xfe": "UTF-16: save it as UTF-8",
    b"\xfe\xff": "UTF-16: save it as UTF-8",
}
"""The first bytes of files that are taken for text, and what to do with them."""


def refuse_what_is_no_text(path: Path, beginning: bytes) -> None:
    """Refuse a file by its first bytes: each of its lines would be refused, and none would say why.

    Raises:
        DataError: it is packed, parquet, or in UTF-16.
    """
    for magic, what in _BEGINNINGS.items():
        if beginning.startswith(magic):
            raise DataError(f"{path}: is {what}. Its name says that it is text in UTF-8.")


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
