"""JSON Lines, read line by line: no type is guessed from other lines, and a bad line is named by file and number."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from lit_rl.data.checks import excerpt, one_of, refuse_other_files
from lit_rl.errors import DataError

OnBadRow = Literal["error", "skip"]
ON_BAD_ROW = ("error", "skip")


class JsonlReader:
    """The `(line number, row)` pairs of a file of one JSON object a line, of which one line at a time is held.

    UTF-8. A byte order mark, CRLF line ends and blank lines are accepted. A line that is not one JSON object, holds the
    literals NaN or Infinity, a number too large for a float, or one of its own keys twice, is bad. Deeper in it the
    last of two equal keys counts, as in Python.

    Args:
        path: The file.
        on_bad_row: `error` raises at the first bad line, `skip` counts bad lines in `skipped`.
    """

    def __init__(self, path: str | Path, *, on_bad_row: OnBadRow = "error") -> None:
        one_of("data.on_bad_row", on_bad_row, ON_BAD_ROW)
        self.path = Path(path)
        self.on_bad_row = on_bad_row
        self.skipped = 0
        """Bad lines met by the latest iteration."""

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows of the file, one a line.

        Raises:
            DataError: the file cannot be read, or a line is bad and `on_bad_row` is `error`.
        """
        self.skipped = 0
        for number, line in numbered_lines(self.path):
            try:
                row = row_of_line(self.path, number, line)
            except DataError:
                if self.on_bad_row == "error":
                    raise
                self.skipped += 1
                continue
            yield number, row


def read_jsonl(path: str | Path, *, on_bad_row: OnBadRow = "error") -> JsonlReader:
    """Return the `(line number, row)` pairs of a file; `.skipped` of the result counts the bad lines left out."""
    return JsonlReader(path, on_bad_row=on_bad_row)


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines of a file with their numbers from 1, unparsed and without the byte order mark.

    Raises:
        DataError: the file cannot be read, or is no text.
    """
    try:
        with open(path, "rb") as lines:
            looked_at = False
            for number, line in enumerate(lines, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    if not looked_at:
                        refuse_other_files(path, line)
                        looked_at = True
                    yield number, line
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def row_of_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return the row of a line.

    Raises:
        DataError: the line is bad. The message names file and line.
    """
    try:
        return parse_object(line)
    except ValueError as error:
        shown = excerpt(line[:400].decode("utf-8", "replace").rstrip("\r\n"))
        fix = "data.on_bad_row=skip leaves out and counts such lines"
        if line.strip() in (b"[", b"{") or line.lstrip().startswith(b"["):
            fix = f"a file of one object a line is needed. Name one value over several lines .json: {path.stem}.json"
        raise DataError(f"{path}:{number}: {error}; {fix}: {shown}") from error


def parse_object(line: bytes) -> dict[str, Any]:
    """Return one JSON object from UTF-8 bytes.

    Raises:
        ValueError: says in a few words what is wrong, without the text itself.
    """
    value = parse_json(line)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object {{...}}, found {_JSON_NAMES[type(value)]}")
    refuse_twice(value)
    return value


def refuse_twice(row: dict[str, Any]) -> None:
    """Refuse a row with two values of one column.

    Args:
        row: A row from `parse_json`.

    Raises:
        ValueError: names the column.
    """
    if isinstance(row, _Twice):
        raise ValueError(f"the key {row.key!r} stands twice")


def parse_json(data: bytes) -> Any:
    """Return strict JSON from UTF-8 bytes: no NaN, no Infinity; `refuse_twice` tells whether an object has a key twice.

    Raises:
        ValueError: says in a few words what is wrong.
    """
    try:
        return _DECODER.decode(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"not valid JSON ({error.msg} at {where})") from error
    except RecursionError as error:
        raise ValueError("nested too deep to be read") from error


def _refuse(literal: str) -> Any:
    raise ValueError(f"{literal} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:20]} is too large")
    return value


class _Twice(dict[str, Any]):
    """An object with a duplicate key, of which the last value counts."""

    key: str


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        found = _Twice(found)
        found.key = next(name for name in names if names.count(name) > 1)
    return found


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object)
_JSON_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
