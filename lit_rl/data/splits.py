"""Training and validation rows: the sources that settings name, their first rows, columns, and what is held out."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lit_rl.core.episode import Prompt
from lit_rl.core.errors import ConfigError, DataError, did_you_mean, in_range
from lit_rl.data.message_forms import to_plain
from lit_rl.data.readers import OnBadRow
from lit_rl.data.rows import RowFunction, apply_map_row, read_row, rename_columns, row_function
from lit_rl.data.sources import Rows, load_rows, rows_of_object

if TYPE_CHECKING:
    from lit_rl.data.visual_prompts import PromptVisuals


CHECKED_ROWS = 100
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
        return rows.changed_by(self) if self else rows

    def check(self, rows: Rows) -> None:
        """Raise DataError where a column is named that none of the first rows has."""
        before: dict[str, None] = {}
        for i in range(min(CHECKED_ROWS, len(rows))):
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
                first = min(CHECKED_ROWS, len(rows))
                raise DataError(
                    f"{self.key}.{what}: none of the first {first} rows of {rows.name} has a column {name!r}; columns "
                    f"found: {', '.join(found)}.{did_you_mean(name, found)}"
                )

    def _mapped(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        return row if self.map_row is None else apply_map_row(self.map_row, row, where, f"{self.key}.map_row")


Row = TypeVar("Row")

_ROWS_OF = {
    "dict": " Make rows of columns: datasets.Dataset.from_dict(columns).",
    "DataFrame": ' Make rows of the table: table.to_dict("records").',
}
"""Conversions of other objects to rows, for messages."""


@dataclass(frozen=True)
class RowSource:
    """A file, folder or hub id to load, and its share of the training rows."""

    path: str
    split: str | None = None
    name: str | None = None
    weight: float = 1.0
    own: SourceColumns = field(default_factory=partial(SourceColumns, "data.path"))
    """Its own mapping and columns."""

    def load(self, on_bad_row: OnBadRow) -> Rows:
        rows = load_rows(self.path, split=self.split, name=self.name, on_bad_row=on_bad_row)
        self.own.check(rows)
        return self.own.of(rows)


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
    rows = load_rows(path, split=split, name=name, on_bad_row=on_bad_row, most=1)
    row, where = rows[0], rows.where(0)
    row = row if own is None else own(row, where)
    return read_row(row, where, rename=rename, map_row=map_row).row, where


def require_exactly_one(**given: Any) -> None:
    """Check that exactly one of these settings is set.

    Raises:
        ConfigError: none or several of the settings are set.
    """
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) != 1:
        keys = ", ".join(f"data.{name}" for name in given)
        raise ConfigError(f"Set exactly one of {keys}. Set now: {', '.join(chosen) or 'none'}.")


def parse_sources(sources: Sequence[Mapping[str, Any]]) -> list[RowSource]:
    """Read `data.sources`: the paths of the files, the weight of each, and what each makes of its rows.

    Raises:
        ConfigError: no source, an unknown or missing key, or a weight that is not above 0.
    """
    if not sources:
        raise ConfigError(
            "data.sources is empty; it takes a list of {path, split, name, weight, map_row, rename, columns}."
        )
    shared = ("path", "split", "name", "weight")
    allowed = (*shared, "map_row", "rename", "columns")
    for i, source in enumerate(sources):
        if not isinstance(source, Mapping) or "path" not in source:
            raise ConfigError(f"data.sources[{i}]={source!r} needs a path; allowed keys are {', '.join(allowed)}.")
        for key in source:
            if key not in allowed:
                hint = did_you_mean(str(key), allowed)
                raise ConfigError(f"data.sources[{i}].{key}: unknown key; allowed are {', '.join(allowed)}.{hint}")
        in_range(f"data.sources[{i}].weight", source.get("weight", 1.0), low=0, open_low=True)
    found = []
    for i, source in enumerate(sources):
        map_row = row_function(source.get("map_row"), f"data.sources[{i}].map_row")
        given = {key: source[key] for key in ("rename", "columns") if key in source}
        own = SourceColumns(f"data.sources[{i}]", map_row, **given)
        found.append(RowSource(**{key: source[key] for key in shared if key in source}, own=own))
    return found


def val_sources(
    source: RowSource | None, val_path: str | Mapping[str, str] | None, val_split: str | Mapping[str, str] | None
) -> dict[str, RowSource]:
    """Return the validation sets that `val_path` and `val_split` name; the name of a single one is empty.

    Args:
        source: The source of `data.path`, where it is set: a `val_split` without a `val_path` is a split of it.
        val_path: One path, or paths by name.
        val_split: One split for all, or splits by name.

    Raises:
        ConfigError: `val_split` alone without `data.path`, or its names are not those of `val_path`.
    """
    if val_path is None and val_split is None:
        return {}
    if val_path is None and source is None:
        raise ConfigError(f"data.val_split={val_split!r} is a split of data.path, which is not set. Set data.val_path.")
    names = [*val_path] if isinstance(val_path, Mapping) else [*val_split] if isinstance(val_split, Mapping) else [""]
    if isinstance(val_split, Mapping) and (set(val_split) != set(names) or not isinstance(val_path, Mapping | None)):
        raise ConfigError(f"data.val_split={dict(val_split)} must have the names of data.val_path={val_path}.")
    if not names or (names != [""] and "" in names):
        raise ConfigError("data.val_path and data.val_split: every validation set needs a name.")
    sets = {}
    for name in names:
        path = val_path[name] if isinstance(val_path, Mapping) else val_path
        split = val_split[name] if isinstance(val_split, Mapping) else val_split
        config = source.name if source and path is None else None
        sets[name] = RowSource(path or (source.path if source else ""), split, config)
    return sets


def hold_out(
    sources: Sequence[Sequence[Row]], fraction: float, seed: int, key: Callable[[Row], str]
) -> tuple[list[list[Row]], list[Row]]:
    """Set a share of the prompts aside: the training rows of each source, and the validation rows of all.

    Rows of equal prompts stay together, so no validation prompt is trained on. The choice depends on the
    prompts, the share and the seed only. If all rows have one prompt, a share of the rows is set aside, as they differ
    in other columns. Something is always left to train on: a single row is never set aside.

    Args:
        sources: The rows, by source.
        fraction: Share of the distinct prompts, in [0, 1); above 0 at least one prompt.
        seed: Seed of the draw.
        key: A text that is equal for rows of equal prompts.
    """
    keys = [[key(example) for example in source] for source in sources]
    if len({name for names in keys for name in names}) == 1:  # a unit that is held out is a row
        keys = [[f"{number} {i}" for i in range(len(names))] for number, names in enumerate(keys)]
    units = list(dict.fromkeys(name for names in keys for name in names))
    count = min(max(1, round(len(units) * fraction)), len(units) - 1) if fraction > 0 and units else 0
    held = set(random.Random(seed).sample(units, count))
    train, val = [], []
    for source, names in zip(sources, keys):
        train.append([example for example, name in zip(source, names) if name not in held])
        val.extend(example for example, name in zip(source, names) if name in held)
    return train, val


def prompt_key(prompt: Prompt, shown: PromptVisuals | None = None) -> str:
    """Return a text that is equal for equal prompts which show equal images."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return text if shown is None else " ".join([text, *(image.digest for image in shown.visuals)])


def refuse_text(key: str, rows: Any) -> None:
    """Raise DataError where rows that were given in Python are a path or another text."""
    if isinstance(rows, str | Path):
        text = str(rows)
        raise DataError(
            f"{key}={text!r} is a text; it takes a list of dicts. A file, folder or hub id is data.path: path={text!r}."
        )


def check_rows(key: str, rows: Any) -> Rows:
    """Return rows that were given in Python, a list or a data set of `datasets`, checked.

    Raises:
        DataError: not a list of dicts, or an empty one.
    """
    rows = rows_of_object(key, rows)
    refuse_text(key, rows)
    if isinstance(rows, bytes | Mapping) or not isinstance(rows, Sequence):
        name = type(rows).__name__
        fix = _ROWS_OF.get(name, "")
        raise DataError(f"{key} is a {name}; it takes a list of dicts, or a data set of `datasets`.{fix}")
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{key}[{i}] is {row!r:.80}; it takes a list of dicts.")
    if not rows:
        raise DataError(f"{key}: no rows.")
    return Rows(key, to_plain([*rows]))
