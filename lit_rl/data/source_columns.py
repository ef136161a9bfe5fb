"""What one source of several makes of its rows, so that they have the columns of the others."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from lit_rl.data.formats import RowFunction, mapped_row, rename_columns
from lit_rl.data.sources import Rows
from lit_rl.errors import ConfigError, DataError, did_you_mean

LOOKED_AT = 100
"""Rows of a source in which every named column has to turn up."""


@dataclass(frozen=True)
class SourceColumns:
    """`map_row`, then `rename`, then `columns`, of one source; what holds for all sources comes after it.

    Args:
        key: Key of the source, for messages.
        map_row: A function from row to row.
        rename: New names of columns, old to new.
        columns: Names, as they are then, of the columns to keep. None: all.

    Raises:
        ConfigError: a setting is of another kind.
    """

    key: str
    map_row: RowFunction | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rename, Mapping):
            raise ConfigError(f"{self.key}.rename={self.rename!r} takes a mapping, old name to new.")
        if self.columns is not None and (isinstance(self.columns, str) or not self.columns):
            raise ConfigError(f"{self.key}.columns={self.columns!r} takes a list of names, at least one.")

    def __bool__(self) -> bool:
        return self.map_row is not None or bool(self.rename) or self.columns is not None

    def __call__(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """Return the row with these columns.

        Raises:
            DataError: the function raised or returned no dict, or two columns would have one name.
        """
        row = rename_columns(self._mapped(row, where), where, self.rename, f"{self.key}.rename")
        return row if self.columns is None else {name: row[name] for name in self.columns if name in row}

    def of(self, rows: Rows) -> Rows:
        """Return all rows of a source with these columns, each changed when it is read."""
        return _ChangedRows(rows, self) if self else rows

    def check(self, rows: Rows) -> None:
        """Raise DataError where a column is named that none of the first rows has."""
        before: dict[str, None] = {}
        for i in range(min(LOOKED_AT, len(rows))):
            try:
                before.update(dict.fromkeys(self._mapped(rows[i], rows.where(i))))
            except DataError:
                continue  # reported or counted where rows are read
        after = dict.fromkeys(self.rename.get(name, name) for name in before)
        wanted = itertools.chain(
            (("rename", name, before) for name in self.rename),
            (("columns", name, after) for name in self.columns or ()),
        )
        for what, name, found in wanted:
            if before and name not in found:
                first = min(LOOKED_AT, len(rows))
                raise DataError(
                    f"{self.key}.{what}: none of the first {first} rows of {rows.name} has a column {name!r}; columns "
                    f"found: {', '.join(found)}.{did_you_mean(name, found)}"
                )

    def _mapped(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        return row if self.map_row is None else mapped_row(self.map_row, row, where, f"{self.key}.map_row")


class _ChangedRows(Rows):
    """Rows of a source, changed one at a time.

    Args:
        rows: The rows as read.
        columns: Changes to each row.
    """

    def __init__(self, rows: Rows, columns: SourceColumns) -> None:
        super().__init__(rows.name, rows, skipped=rows.skipped)
        self.folder = rows.folder
        self._given, self._columns = rows, columns

    def where(self, index: int) -> str:
        return self._given.where(index)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._columns(self._given[index], self._given.where(index))
