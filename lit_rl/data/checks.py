"""Small helpers that make a refusal readable."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lit_rl.core.errors import ConfigError, DataError, did_you_mean

_BEGINNINGS = {
    b"\x1f\x8b": "packed by gzip: unpack it first",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "packed by zstd: unpack it first",
    b"BZh91AY&SY": "packed by bzip2: unpack it first",
    b"PAR1\x15": "parquet: name it .parquet",
    b"version https://git-lfs": "a pointer of Git LFS, without the data: fetch them with `git lfs pull`",
    b"<!DOCTYPE": "a web page: download the file itself (of the hub, by its `resolve` address)",
    b"<!doctype": "a web page: download the file itself (of the hub, by its `resolve` address)",
    b"<html": "a web page: download the file itself (of the hub, by its `resolve` address)",
    b"\xff\xfe": "UTF-16: save it as UTF-8",
    b"\xfe\xff": "UTF-16: save it as UTF-8",
}
"""First bytes of files that are mistaken for text, with the advice for each."""


def refuse_other_files(path: Path, beginning: bytes, named: str = "text in UTF-8") -> None:
    """Refuse a file by its first bytes: a reader would refuse its lines, or all of it, and not say why.

    Args:
        path: The file.
        beginning: First bytes of the file, at least 32 where it has as many.
        named: Type that the file's name promises.

    Raises:
        DataError: it is packed, parquet, in UTF-16, a web page, or a pointer to a file that was not fetched.
    """
    for magic, what in _BEGINNINGS.items():
        if beginning.lstrip(b" \r\n\t").startswith(magic):
            raise DataError(f"{path}: is {what}. Its name says that it is {named}.")


SEVERAL_PATHS = (
    "data.path takes one file, folder or hub id. Several are 'data.sources=[{path:A},{path:B}]', each with a weight, "
    "a rename or a map_row of its own where it needs one."
)
"""The message where a list was given as a path."""


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
    """Return the first characters of a text on one line, control characters written as escapes."""
    head = text[:length]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in head)
