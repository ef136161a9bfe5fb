"""Readers of files: JSON Lines, tables of text cells and parquet, row by row.

No type is guessed from other lines, and a bad line is named by file and number. The `rows_of_*` generators start at any
row without parsing the rows before it. They yield a bad row as its error and do not raise it, because a generator that
has raised cannot go on.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from lit_rl.core.errors import DataError, excerpt

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


OnBadRow = Literal["error", "skip"]
ON_BAD_ROW = ("error", "skip")


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


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
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
    refuse_duplicate_key(value)
    return value


def refuse_duplicate_key(row: dict[str, Any]) -> None:
    """Refuse a row with two values of one column.

    Args:
        row: A row from `parse_json`.

    Raises:
        ValueError: names the column.
    """
    if isinstance(row, _DuplicateKey):
        raise ValueError(f"duplicate key {row.key!r}")


def parse_json(data: bytes) -> Any:
    """Return strict JSON from UTF-8 bytes: no NaN, no Infinity; `refuse_duplicate_key` tells whether an object has a
    key twice.

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


def _refuse_literal(literal: str) -> Any:
    raise ValueError(f"{literal} is no JSON number")


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:20]} is too large")
    return value


class _DuplicateKey(dict[str, Any]):
    """An object with a duplicate key, of which the last value counts."""

    key: str


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        found = _DuplicateKey(found)
        found.key = next(name for name in names if names.count(name) > 1)
    return found


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_literal, parse_float=_parse_float, object_pairs_hook=_object_of_pairs
)
_JSON_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


BATCH = 256
"""Rows that are made of a columnar file at once."""

_DELIMITERS = ";\t|,"
"""Delimiters of tables that are called .csv."""

RawRow = tuple[int, dict[str, Any] | DataError]
"""The line number of a row (in a file without lines its index from 0), and the row or its error."""


def rows_of_lines(path: Path, skip: int = 0) -> Iterator[RawRow]:
    """Yield the rows of a file of one JSON object a line, of which one line at a time is held.

    UTF-8. A byte order mark, CRLF line ends and blank lines are accepted. A line that is not one JSON object, holds the
    literals NaN or Infinity, a number too large for a float, or one of its own keys twice, is bad. Deeper in it the
    last of two equal keys counts, as in Python.

    Raises:
        DataError: the file cannot be read.
    """
    for number, line in itertools.islice(numbered_lines(path), skip, None):
        row: dict[str, Any] | DataError
        try:
            row = parse_line(path, number, line)
        except DataError as error:
            row = error
        yield number, row


def rows_of_cells(delimiter: str, path: Path, skip: int = 0) -> Iterator[RawRow]:
    """Yield the rows of a table of text cells under a header; blank lines are none.

    Raises:
        DataError: the file cannot be read, cells are not divided by the delimiter, or a column name is duplicated.
    """

    def refusal(error: Exception) -> DataError:
        fix = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else "is it there, and may you read it?"
        return DataError(f"{path}: cannot be read: {error}; {fix}")

    return _with_errors_as(_table_rows(path, delimiter, skip), (UnicodeDecodeError, OSError), refusal)


def rows_of_parquet(path: Path, skip: int = 0) -> Iterator[RawRow]:
    """Yield the rows of a parquet file, `BATCH` of them in memory; row groups that are skipped whole are not read.

    Raises:
        DataError: the file cannot be read.
    """
    import pyarrow

    def refusal(error: Exception) -> DataError:
        return DataError(f"{path}: cannot be read as parquet: {excerpt(str(error), 200)}")

    return _with_errors_as(_parquet_rows(path, skip), (pyarrow.ArrowException, OSError), refusal)


ARGUMENTS = ("arguments", "args", "input", "parameters")
"""Keys of a call in which programs write its arguments."""


def row_of_table(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a columnar file with the tool calls of its messages restored to their original keys.

    All structs of a column have the same keys, so a table fills the arguments that a call does not have with None: keys
    of None are left out of arguments, at every depth. Arguments that are JSON text keep their nulls.
    """
    restored = dict(row)
    for name, value in row.items():
        if isinstance(value, list):
            restored[name] = [
                {key: _in_arguments(item) if key in _CALLS else item for key, item in each.items()}
                if isinstance(each, dict) and ("role" in each or "from" in each)
                else each
                for each in value
            ]
    return restored


_CALLS = ("tool_calls", "function_call", "content")
"""Keys of a message that may hold calls; `content` in its parts."""


def _in_arguments(value: Any) -> Any:
    """Return the value with no key of None in any object that holds the arguments of a call."""
    if isinstance(value, list):
        return [_in_arguments(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: without_none(item) if key in ARGUMENTS else _in_arguments(item) for key, item in value.items()}


def without_none(value: Any) -> Any:
    """Return the value without keys that hold None, at every depth: tables fill the absent keys of a struct with it."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def _table_rows(path: Path, delimiter: str, skip: int) -> Iterator[RawRow]:
    with open(path, "rb") as file:
        refuse_other_files(path, file.read(64))
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        lines = _csv_lines(reader, path)
        header = next(lines, [])
        if len(header) == 1 and (other := next((c for c in _DELIMITERS if c in header[0]), "")):
            raise DataError(
                f"{path}:1: the header is one column, {excerpt(header[0])}: its cells seem to be divided by {other!r}, "
                f"and {path.suffix} is read as divided by {delimiter!r}. Write it with commas (.csv) or tabs (.tsv)."
            )
        if len(set(header)) < len(header):
            raise DataError(f"{path}:1: duplicate column names: {', '.join(header)}")
        for cells in itertools.islice((cells for cells in lines if cells), skip, None):
            if len(cells) == len(header):
                yield reader.line_num, dict(zip(header, cells))
            else:
                what = f"{len(cells)} cells under {len(header)} column names"
                shown = excerpt(delimiter.join(cells))
                yield reader.line_num, DataError(f"{path}:{reader.line_num}: {what}: {shown}")


def _csv_lines(reader: Any, path: Path) -> Iterator[list[str]]:
    while True:
        begun = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{path}:{begun}: the row that begins here cannot be read: {error}. A cell with quotes, delimiters or "
                "line breaks stands in double quotes, and quotes in it are doubled; .jsonl has no such limits."
            ) from error
        if cells is None:
            return
        yield cells


def _parquet_rows(path: Path, skip: int) -> Iterator[RawRow]:
    import pyarrow.parquet

    refuse_other_parquet(path)
    with pyarrow.parquet.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = list(itertools.accumulate(sizes))
        groups = [i for i, end in enumerate(ends) if end > skip]
        first = ends[groups[0]] - sizes[groups[0]] if groups else 0
        for batch in file.iter_batches(batch_size=BATCH, row_groups=groups) if groups else ():
            rows = [row_of_table(row) for row in batch.slice(max(0, skip - first)).to_pylist()]
            yield from enumerate(rows, first + len(batch) - len(rows))
            first += len(batch)


def refuse_other_parquet(path: Path) -> None:
    """Raise DataError where a file that is called .parquet is text, or packed."""
    with open(path, "rb") as file:
        beginning = file.read(64)
    if not beginning.startswith(b"PAR1"):
        refuse_other_files(path, beginning, "parquet")


def _with_errors_as(
    rows: Iterator[RawRow], errors: tuple[type[Exception], ...], refusal: Callable[[Exception], DataError]
) -> Iterator[RawRow]:
    while True:
        # No yield inside `try`: the names of the errors may be gone when Python closes an open generator at exit.
        try:
            row = next(rows, None)
        except errors as error:
            raise refusal(error) from error
        if row is None:
            return
        yield row
