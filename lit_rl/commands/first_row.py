"""What is told from the beginning of a data source, before anything else is read: what its columns are for, and whether
it is small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lit_rl.data.formats import RowFunction, mapped_row, rename_columns
from lit_rl.data.jsonl import OnBadRow
from lit_rl.data.raw_rows import RawRow, rows_of_cells, rows_of_lines, rows_of_parquet
from lit_rl.data.source_columns import SourceColumns
from lit_rl.data.sources import load_rows
from lit_rl.errors import DataError

_READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": rows_of_lines,
    ".ndjson": rows_of_lines,
    ".csv": partial(rows_of_cells, delimiter=","),
    ".tsv": partial(rows_of_cells, delimiter="\t"),
    ".parquet": rows_of_parquet,
}
"""Files whose first row is read without the rest."""


def first_row(
    path: str,
    *,
    split: str | None = None,
    name: str | None = None,
    on_bad_row: OnBadRow = "error",
    own: SourceColumns | None = None,
    rename: Mapping[str, str] | None = None,
    map_row: RowFunction | None = None,
) -> tuple[dict[str, Any], str]:
    """The first row of `path` under the names that it is read by, and where it stands.

    Of a file its beginning is read; a .json array, a folder and the hub are opened as for a training.

    Args:
        path: As `data.path`; the other settings are those of `SourcedDataModule` too.
        own: What its source alone makes of rows.

    Raises:
        DataError: nothing is there, it cannot be read, or it has no row.
        BackendError: the hub cannot be reached.
        ConfigError: `split` or `name` came with what has none.
    """
    row, where = _of_file(Path(path).expanduser(), on_bad_row) if split is None and name is None else (None, "")
    if row is None:  # also where there is none: it is said as everywhere else
        rows = load_rows(path, split=split, name=name, on_bad_row=on_bad_row)
        row, where = rows[0], rows.where(0)
    row = row if own is None else own(row, where)
    return as_read(row, where, rename=rename, map_row=map_row), where


def rows_in(path: str, most: int) -> int | None:
    """How many rows a local file of yours has, where they are at most `most`; None where it has more, or is none."""
    file = Path(path).expanduser()
    reader = _READERS.get(file.suffix.lower())
    if reader is None or not file.is_file():
        return None
    if reader is rows_of_lines:  # which would parse them
        with file.open("rb") as lines:
            count = sum(1 for _ in islice((line for line in lines if line.strip()), most + 1))
    else:
        count = sum(1 for _ in islice(reader(file), most + 1))
    return count if count <= most else None


def as_read(
    row: dict[str, Any], where: str, *, rename: Mapping[str, str] | None, map_row: RowFunction | None
) -> dict[str, Any]:
    """A row as its reader sees it: mapped, and its columns renamed."""
    row = row if map_row is None else mapped_row(map_row, row, where)
    return rename_columns(row, where, rename or {})


def _of_file(path: Path, on_bad_row: OnBadRow) -> tuple[dict[str, Any] | None, str]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None or not path.is_file():
        return None, ""
    for place, row in reader(path):
        if not isinstance(row, DataError):
            return row, f"{path}[{place}]" if path.suffix.lower() == ".parquet" else f"{path}:{place}"
        if on_bad_row == "error":
            raise row
    return None, ""
