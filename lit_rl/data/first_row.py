"""The first row of a data source, read before anything else: its columns show the kind of example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lit_rl.core.errors import DataError
from lit_rl.data.readers import OnBadRow, RawRow, rows_of_cells, rows_of_lines, rows_of_parquet
from lit_rl.data.rows import RowFunction, read_row
from lit_rl.data.sources import load_rows
from lit_rl.data.splits import SourceColumns

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
    """Return the first row of `path` under the names that it is read by, and its place.

    Only the beginning of a file is read; a .json array, a folder and the hub are opened as for a training.

    Args:
        path: As `data.path`; the other settings are those of `SourcedDataModule` too.
        own: Changes to rows that its source alone makes.

    Raises:
        DataError: nothing is there, it cannot be read, or it has no row.
        BackendError: the hub cannot be reached.
        ConfigError: `split` or `name` is set for a source that has none.
    """
    row, where, file = None, "", Path(path).expanduser()
    reader = _READERS.get(file.suffix.lower()) if split is None and name is None and file.is_file() else None
    if reader is not None:
        for place, found in reader(file):
            if not isinstance(found, DataError):
                row, where = found, f"{file}[{place}]" if file.suffix.lower() == ".parquet" else f"{file}:{place}"
                break
            if on_bad_row == "error":
                raise found
    if row is None:  # also where there is no such file: the usual error
        rows = load_rows(path, split=split, name=name, on_bad_row=on_bad_row)
        row, where = rows[0], rows.where(0)
    row = row if own is None else own(row, where)
    return read_row(row, where, rename=rename, map_row=map_row).row, where
