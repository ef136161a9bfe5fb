"""Sources that are read as their rows are needed, from any row on, and again from the first after the last."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_info

from lit_rl.data.checks import excerpt, one_of
from lit_rl.data.hub import GivenRows, open_hub, open_saved
from lit_rl.data.jsonl import ON_BAD_ROW, OnBadRow
from lit_rl.data.raw_rows import BATCH, RawRow, row_of_table, rows_of_cells, rows_of_lines, rows_of_parquet
from lit_rl.data.source_columns import SourceColumns
from lit_rl.data.sources import Rows, hub_name, is_one_value, local_path, suffix_of
from lit_rl.data.splits import Source
from lit_rl.errors import BackendError, ConfigError, DataError

Reader = Callable[[int], Iterator[RawRow]]
"""Reads the rows of a source after as many that are skipped."""


class Mark(NamedTuple):
    """A place in a source that is read again and again."""

    passes: int = 0
    """Number of complete passes over the source."""
    rows: int = 0
    """Rows that were taken since, bad ones included."""


class RowStream:
    """An endless stream of the rows of one source.

    A file of lines is read line by line, parquet by batches, a saved folder through its memory map; a folder of data
    files and the hub as `datasets` streams them. No row is kept.

    Args:
        source: The source to read: a file, folder or hub id, or a data set of `datasets`.
        on_bad_row: Action for a row that cannot be read: `error` raises, `skip` counts it. A bad row is one of those
            taken in any case, so that a place can be found again without parsing what is before it.

    Raises:
        ConfigError: the source is in memory whole (a .json array), or its split is a slice.
        DataError: nothing is there, or it cannot be read.
        BackendError: the hub cannot be reached, or does not give the data set.
    """

    def __init__(self, source: Source | GivenRows, on_bad_row: OnBadRow = "error") -> None:
        one_of("data.on_bad_row", on_bad_row, ON_BAD_ROW)
        self.on_bad_row = on_bad_row
        self.name, self._read, self._has_lines = _opened(source)
        self._own = source.own if isinstance(source, Source) else SourceColumns(self.name)
        self._mark = Mark()
        self._rows: Iterator[RawRow] | None = None

    def take(self, mark: Mark, count: int) -> tuple[Rows, Mark]:
        """Return the next `count` rows after a position, and the position after them.

        Going on where the last call ended reads on; from any other place the source is opened again.

        Raises:
            DataError: a row is bad and `on_bad_row` is `error`, the source has no rows, or it cannot be read.
            BackendError: the hub cannot be reached any more.
        """
        raw = self._rows if mark == self._mark and self._rows is not None else self._read(mark.rows)
        self._rows = None  # a generator that has raised is exhausted
        rows, places, skipped, begun = [], [], 0, mark
        for _ in range(count):
            while (item := next(raw, None)) is None:
                if not mark.rows:
                    raise DataError(f"data.path={self.name}: no rows.")
                if mark.passes == begun.passes:
                    rank_zero_info(f"{self.name}: read to its end; starting again from the first row.")
                mark, raw = Mark(mark.passes + 1), self._read(0)
            place, row = item
            mark = Mark(mark.passes, mark.rows + 1)
            if not isinstance(row, DataError):
                rows.append(row)
                places.append(place)
            elif self.on_bad_row == "error":
                raise row
            else:
                skipped += 1
        self._mark, self._rows = mark, raw
        where = {"lines": places} if self._has_lines else {"indices": places}
        return self._own.of(Rows(self.name, rows, skipped=skipped, **where)), mark

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rows": None}  # an open file cannot go to another process


def _opened(source: Any) -> tuple[str, Reader, bool]:
    """Return the name of a source for messages, its reader, and whether its rows have line numbers."""
    if not isinstance(source, Source):
        return "data.rows", partial(_rows_of_data, source, "data.rows"), False
    path, split, name = source.path, source.split, source.name
    local = local_path(path)
    if local is not None and local.is_file():
        suffix = suffix_of(local, split, name)
        return str(local), _file_reader(local, suffix), suffix != ".parquet"
    if split is not None and "[" in split:
        raise ConfigError(
            f"data.split={split!r} with data.stream_buffer: a slice needs all rows. Name a whole split, or leave "
            "data.stream_buffer out."
        )
    if local is not None:
        data = open_saved(local, split=split, name=name, streaming=True)
        return str(local), partial(_rows_of_data, data, str(local)), False
    data, title = open_hub(path, split=split, name=name, streaming=True), hub_name(path, split)
    return title, partial(_rows_of_data, data, title), False


def _file_reader(path: Path, suffix: str) -> Reader:
    if suffix == ".parquet":
        return partial(rows_of_parquet, path)
    if suffix in (".csv", ".tsv"):
        return partial(rows_of_cells, path, "," if suffix == ".csv" else "\t")
    if suffix == ".json" and is_one_value(path):
        raise ConfigError(
            f"data.stream_buffer with data.path={path}: a .json file of one value is read whole. Write one object a "
            "line (.jsonl), or leave data.stream_buffer out."
        )
    return partial(rows_of_lines, path)


def _rows_of_data(data: Any, name: str, skip: int) -> Iterator[RawRow]:
    """Yield rows of a data set of `datasets`, mapped into memory or streamed."""
    import datasets

    if isinstance(data, datasets.Dataset):
        table = data.with_format("arrow")
        for start in range(skip, len(data), BATCH):
            rows: Any = table[start : start + BATCH]
            yield from enumerate(map(row_of_table, rows.to_pylist()), start)
        return
    streamed = iter(data.skip(skip))
    for index in itertools.count(skip):
        try:
            row = next(streamed, None)
        except OSError as error:
            raise BackendError(f"{name}[{index}]: cannot be read on: {excerpt(str(error), 200)}") from error
        except Exception as error:  # `datasets` raises errors of many classes for bad data
            raise DataError(f"{name}[{index}]: cannot be read: {excerpt(str(error), 200)}") from error
        if row is None:
            return
        yield index, row_of_table(row)
