"""The rows of a file one at a time, from any row on; what is before it is not parsed.

A bad row is yielded as its error, not raised: a generator that has raised cannot go on.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lit_rl.data.checks import excerpt, refuse_other_files
from lit_rl.data.jsonl import numbered_lines, row_of_line
from lit_rl.errors import DataError

BATCH = 256
"""Rows that are made of a columnar file at once."""

_DELIMITERS = ";\t|,"
"""Delimiters of tables that are called .csv."""

RawRow = tuple[int, dict[str, Any] | DataError]
"""The line number of a row (in a file without lines its index from 0), and the row or its error."""


def rows_of_lines(path: Path, skip: int = 0) -> Iterator[RawRow]:
    """Yield the rows of JSON Lines; blank lines are none.

    Raises:
        DataError: the file cannot be read.
    """
    for number, line in itertools.islice(numbered_lines(path), skip, None):
        row: dict[str, Any] | DataError
        try:
            row = row_of_line(path, number, line)
        except DataError as error:
            row = error
        yield number, row


def rows_of_cells(path: Path, delimiter: str, skip: int = 0) -> Iterator[RawRow]:
    """Yield the rows of a table of text cells under a header; blank lines are none.

    Raises:
        DataError: the file cannot be read, cells are not divided by the delimiter, or a column name is duplicated.
    """

    def refusal(error: Exception) -> DataError:
        fix = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else "is it there, and may you read it?"
        return DataError(f"{path}: cannot be read: {error}; {fix}")

    return _each(_cells(path, delimiter, skip), (UnicodeDecodeError, OSError), refusal)


def rows_of_parquet(path: Path, skip: int = 0) -> Iterator[RawRow]:
    """Yield the rows of a parquet file, `BATCH` of them in memory; row groups that are skipped whole are not read.

    Raises:
        DataError: the file cannot be read.
    """
    import pyarrow

    def refusal(error: Exception) -> DataError:
        return DataError(f"{path}: cannot be read as parquet: {excerpt(str(error), 200)}")

    return _each(_records(path, skip), (pyarrow.ArrowException, OSError), refusal)


ARGUMENTS = ("arguments", "args", "input", "parameters")
"""Keys of a call in which programs write its arguments."""


def row_of_table(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a columnar file with the tool calls of its messages restored to their original keys.

    All structs of a column have the same keys, so a table fills the arguments that a call does not have with None: keys
    of None are left out of arguments, at every depth. Arguments that are JSON text keep their nulls.
    """
    return {name: _of_messages(value) if isinstance(value, list) else value for name, value in row.items()}


def _of_messages(value: list[Any]) -> list[Any]:
    return [
        {key: _in_arguments(item) if key in _CALLS else item for key, item in each.items()}
        if isinstance(each, dict) and ("role" in each or "from" in each)
        else each
        for each in value
    ]


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


def _cells(path: Path, delimiter: str, skip: int) -> Iterator[RawRow]:
    with open(path, "rb") as file:
        refuse_other_files(path, file.read(64))
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        lines = _parsed(reader, path)
        header = next(lines, [])
        if len(header) == 1 and (other := next((c for c in _DELIMITERS if c in header[0]), "")):
            raise DataError(
                f"{path}:1: the header is one column, {excerpt(header[0])}: its cells seem to be divided by {other!r}, "
                f"and {path.suffix} is read as divided by {delimiter!r}. Write it with commas (.csv) or tabs (.tsv)."
            )
        if len(set(header)) < len(header):
            raise DataError(f"{path}:1: a column name stands twice: {', '.join(header)}")
        for cells in itertools.islice((cells for cells in lines if cells), skip, None):
            if len(cells) == len(header):
                yield reader.line_num, dict(zip(header, cells))
            else:
                what = f"{len(cells)} cells under {len(header)} column names"
                shown = excerpt(delimiter.join(cells))
                yield reader.line_num, DataError(f"{path}:{reader.line_num}: {what}: {shown}")


def _parsed(reader: Any, path: Path) -> Iterator[list[str]]:
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


def _records(path: Path, skip: int) -> Iterator[RawRow]:
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


def _each(
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
