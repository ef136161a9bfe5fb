"""Sources of rows: a file, a folder of `datasets`, or a data set of the hub, read into `Rows`.

`Rows` know their file and line, for messages. No code that comes with a data set is ever run: `datasets` 4 and later
has no loading scripts.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from lit_rl.core.errors import BackendError, ConfigError, DataError, did_you_mean, excerpt, one_of
from lit_rl.core.machine import go_offline_if_unreachable
from lit_rl.data.kinds import COLUMNS
from lit_rl.data.message_forms import MESSAGES, SHAREGPT
from lit_rl.data.readers import (
    BATCH,
    ON_BAD_ROW,
    OnBadRow,
    RawRow,
    parse_json,
    refuse_duplicate_key,
    refuse_other_files,
    row_of_table,
    rows_of_cells,
    rows_of_lines,
    rows_of_parquet,
)

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    GivenRows = list[dict[str, Any]] | Dataset | IterableDataset
    """Rows that are handed over in Python. Configs that are read from files know lists alone."""
else:
    GivenRows = list[dict[str, Any]]


SEVERAL_PATHS = (
    "data.path takes one file, folder or hub id. Several are 'data.sources=[{path:A},{path:B}]', each with a weight, "
    "a rename or a map_row of its own where it needs one."
)
"""The message where a list was given as a path."""

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")


class Rows(Sequence[dict[str, Any]]):
    """Rows of one source.

    Args:
        name: Name of the source in messages.
        rows: The rows.
        lines: Line number of each row, where the source is a file of lines.
        indices: Number of each row in the source, from 0, where these are not all of its rows.
        skipped: Number of bad rows that the reader left out.
        folder: The folder of the source on this machine, which relative paths of its rows begin at; None where it has
            none.
    """

    def __init__(
        self,
        name: str,
        rows: Sequence[dict[str, Any]],
        *,
        lines: Sequence[int] | None = None,
        indices: Sequence[int] | None = None,
        skipped: int = 0,
        folder: Path | None = None,
    ) -> None:
        self.name, self.skipped, self.folder = name, skipped, folder
        self._rows = rows
        self._change: Callable[[dict[str, Any], str], dict[str, Any]] | None = None
        self._lines = lines
        self._indices = range(len(rows)) if indices is None else indices

    def changed_by(self, change: Callable[[dict[str, Any], str], dict[str, Any]]) -> Rows:
        """Return the rows as `change` makes them of a row and its place, each when it is read."""
        changed = copy(self)
        changed._change = change
        return changed

    def where(self, index: int) -> str:
        """Return the place of a row for a message: `file:line`, or `source[index]` counted from 0."""
        if self._lines is None:
            return f"{self.name}[{self._indices[index]}]"
        return f"{self.name}:{self._lines[index]}"

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._rows[index] if self._change is None else self._change(self._rows[index], self.where(index))


@dataclass(frozen=True)
class OpenSource:
    """A source that is ready to be read from any row on: the one place that knows its kind."""

    name: str
    """Name of the source in messages."""
    read: Callable[[int], Iterator[RawRow]]
    """Reads the rows after as many that are skipped; a bad row is one of them."""
    has_lines: bool
    """True if the numbers of its rows are those of lines; otherwise rows are counted from 0."""
    folder: Path | None = None
    """See `Rows.folder`."""
    data: IterableDataset | None = None
    """The data set, where `datasets` streams it: its state finds a place again, see `RowStream`."""

    def collect(self, rows: Iterable[RawRow], on_bad_row: OnBadRow, most: float = float("inf")) -> Rows:
        """Return rows that were read here, at most `most` of them.

        Raises:
            DataError: the first bad row, where `on_bad_row` is `error`; where it is `skip`, such rows are counted.
        """
        found, places, skipped = [], [], 0
        for place, row in rows:
            if not isinstance(row, DataError):
                found.append(row)
                places.append(place)
            elif on_bad_row == "error":
                raise row
            else:
                skipped += 1
            if len(found) == most:
                break
        where = {"lines": places} if self.has_lines else {"indices": places}
        return Rows(self.name, found, skipped=skipped, folder=self.folder, **where)


def open_source(
    path: str | Path, *, split: str | None = None, name: str | None = None, streaming: bool = False
) -> OpenSource:
    """Open a file, a folder or a hub data set. Nothing of a file is parsed yet.

    Args:
        path: See `load_rows`, also for `split` and `name`.
        split: The split.
        name: The configuration.
        streaming: Refuse what can only be read whole, and let `datasets` stream.

    Raises:
        DataError: nothing is there, or it cannot be read.
        BackendError: the hub cannot be reached, or does not give the data set.
        ConfigError: `split` or `name` is set for a source that has none; or it cannot be streamed: a .json array, or a
            slice of a split.
    """
    local = local_path(path)
    if local is not None and local.is_file():
        suffix = suffix_of(local, split, name)
        if suffix == ".json" and is_one_value(local):
            if streaming:
                raise ConfigError(
                    f"data.stream_buffer with data.path={local}: a .json file of one value is read whole. Write one "
                    "object a line (.jsonl), or leave data.stream_buffer out."
                )
            return OpenSource(str(local), partial(_rows_of_value, local), False, local.parent)
        return OpenSource(str(local), partial(_READERS[suffix], local), suffix != ".parquet", local.parent)
    if streaming and split is not None and "[" in split:
        raise ConfigError(
            f"data.split={split!r} with data.stream_buffer: a slice needs all rows. Name a whole split, or leave "
            "data.stream_buffer out."
        )
    how = {"streaming": True} if streaming else {}
    if local is not None:
        data, title = open_saved(local, split=split, name=name, **how), str(local)
    else:
        data, title = open_hub(str(path), split=split, name=name, **how), f"{path}[{split}]" if split else str(path)
    streamed = None if isinstance(data, Sized) else data
    return OpenSource(title, partial(rows_of_data, data, title), False, local, streamed)


_READERS: dict[str, Callable[[Path, int], Iterator[RawRow]]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), rows_of_lines),
    ".csv": partial(rows_of_cells, ","),
    ".tsv": partial(rows_of_cells, "\t"),
    ".parquet": rows_of_parquet,
}


def load_rows(
    path: str | Path,
    *,
    split: str | None = None,
    name: str | None = None,
    on_bad_row: OnBadRow = "error",
    most: float = float("inf"),
) -> Rows:
    """Read the rows of a file, a folder or a hub data set.

    Args:
        path: A .jsonl, .ndjson, .json, .parquet, .csv or .tsv file; a folder written by `datasets.save_to_disk`, or one
            that holds data files; otherwise a hub id. The cells of .csv and .tsv are text, never guessed numbers.
        split: The split, for what has splits; a hub id and a folder of data files take slices: `train[:100]`.
        name: The configuration, for what has several on the hub.
        on_bad_row: Action for a row that cannot be read: `error` raises, `skip` counts it in `.skipped`.
        most: Number of rows after which the rest is not read.

    Raises:
        DataError: nothing is there, it cannot be read, or no row is left.
        BackendError: the hub cannot be reached, or does not give the data set.
        ConfigError: `split` or `name` is set for a source that has none.
    """
    one_of("data.on_bad_row", on_bad_row, ON_BAD_ROW)
    source = open_source(path, split=split, name=name)
    rows = source.collect(source.read(0), on_bad_row, most)
    if not len(rows):
        left_out = f" ({rows.skipped} bad rows were left out)" if rows.skipped else ""
        raise DataError(f"data.path={path}: no rows{left_out}.")
    return rows


def local_path(path: str | Path) -> Path | None:
    """Return the file or folder that is meant; None where it is a hub id.

    Raises:
        DataError: it looks like a path, and nothing is there; or what is there is neither a file nor a folder.
    """
    local = Path(path).expanduser()
    if local.is_file() or local.is_dir():
        return local
    if local.exists():
        raise DataError(
            f"data.path={path} is a pipe or a device. Data is read more than once: write it to a file first."
        )
    if "://" in str(path):
        kind, _, rest = str(path).partition("://")
        hub = "/".join(rest.removeprefix("datasets/").split("/")[:2])
        fix = f"Of the hub type the id: {hub}." if kind == "hf" else "Fetch it first, and give the file."
        raise DataError(f"data.path={path} is an address; a file, a folder or an id of the hub is read. {fix}")
    text = str(path)
    starts = text.startswith((".", "/", "~"))
    if not (text.lower().endswith(SUFFIXES) or starts or "\\" in text or text.count("/") > 1):
        return None  # a hub id, which is `name` or `owner/name`
    folder, hint = next((parent for parent in local.parents if parent.is_dir()), Path()), ""
    if folder != local.parent:
        hint = f" The folder {local.parent} does not exist."
    else:
        with suppress(OSError):
            hint = did_you_mean(local.name, [entry.name for entry in folder.iterdir()])
    raise DataError(f"data.path={path}: no such file or folder.{hint}")


def suffix_of(path: Path, split: str | None, name: str | None) -> str:
    """Return the suffix of a file, one of `SUFFIXES`.

    Raises:
        ConfigError: `split` or `name` is set, which a file does not have.
        DataError: another kind of file.
    """
    for key, value in (("split", split), ("name", name)):
        if value is not None:
            raise ConfigError(f"data.{key}={value!r} came with the file {path}, which has none: remove data.{key}.")
    if (suffix := path.suffix.lower()) not in SUFFIXES:
        packed = " Unpack it first." if suffix in PACKED else ""
        raise DataError(
            f"data.path={path}: unknown kind of file {suffix!r}; allowed are {', '.join(SUFFIXES)}.{packed}"
        )
    return suffix


def _rows_of_value(path: Path, skip: int = 0) -> Iterator[RawRow]:
    """Yield the rows of a .json file of one value.

    Raises:
        DataError: the file cannot be read, or holds no rows.
    """
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    refuse_other_files(path, data[:64])
    try:
        items = parse_json(data)
        if isinstance(items, dict):
            refuse_duplicate_key(items)
            tables = _tables_in(items, path)
            items = [items] if tables is None else tables
        if not isinstance(items, list):
            raise DataError(f"{path}: holds {excerpt(repr(items))}; rows are objects {{...}}.")
    except ValueError as error:
        raise DataError(
            f"{path}: {error}; a .json file holds an array of objects, one object with such an array or of columns, or "
            "one object a line."
        ) from error
    for index, item in enumerate(items[skip:], skip):
        row: dict[str, Any] | DataError
        try:
            if not isinstance(item, dict):
                raise ValueError(f"expected an object {{...}}, found {excerpt(repr(item))}")
            refuse_duplicate_key(item)
            row = item
        except ValueError as error:
            row = DataError(f"{path}[{index}]: {error}")
        yield index, row


def is_one_value(path: Path) -> bool:
    """Tell whether a .json file is one value, and no object a line: an array, or an object over lines or of lists.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            lines = (line for line in file if line.removeprefix(b"\xef\xbb\xbf").strip())
            first, second, third = next(lines, b""), next(lines, b""), next(lines, b"")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    first = first.removeprefix(b"\xef\xbb\xbf").strip()
    if first.startswith(b"["):
        return True
    try:
        value = parse_json(first)
    except ValueError:  # the first line of many may be cut off, too: then the others are objects
        return (
            first.startswith(b"{")
            and not first.endswith(b"}")
            and not (_is_object(second) and (not third or _is_object(third)))
        )
    return not second and isinstance(value, dict) and _tables_in(value, path) is not None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line.strip()), dict)
    except ValueError:
        return False


def _tables_in(value: dict[str, Any], path: Path) -> list[Any] | None:
    """Return the rows that an object holds under a name or by columns; None where it is a row itself.

    Raises:
        DataError: it holds several tables.
    """
    if not value or any(_is_of_a_row(name, held) for name, held in value.items()):
        return None
    arrays = {n: held for n, held in value.items() if isinstance(held, list) and held and isinstance(held[0], dict)}
    if arrays and not value.keys() & _NAMES:
        if len(arrays) > 1:
            raise DataError(f"{path}: holds several tables: {', '.join(arrays)}. Write each to a file of its own.")
        return next(iter(arrays.values()))
    if len({*map(_width, value.values())}) == 1 and _width(next(iter(value.values()))):
        columns = [held if isinstance(held, list) else list(held.values()) for held in value.values()]
        return [dict(zip(value, cells)) for cells in zip(*columns)]
    return None


_NAMES = {SHAREGPT, "prompt", *(name for columns in COLUMNS.values() for name in columns)}
"""Columns that are known."""


def _is_of_a_row(name: str, held: Any) -> bool:
    """Tell whether a list is what one row has in a column, and no table or column of several rows."""
    if not isinstance(held, list) or not held:
        return False
    if name in ("input_ids", "completions"):
        return not isinstance(held[0], list)
    return name in (*MESSAGES, SHAREGPT, "tools", "images", "videos") and isinstance(held[0], dict)


def _width(column: Any) -> int:
    """Return the number of cells of a column: a list, or an object whose names count from 0, as pandas writes one; 0
    for any other value."""
    if isinstance(column, list):
        return len(column)
    counts = isinstance(column, dict) and [*column] == [str(i) for i in range(len(column))]
    return len(column) if counts else 0


MANY = 1_000_000
"""Rows of a stream after which the user is warned that it may be endless."""
LONG = 30.0
"""Seconds of reading after which the user is warned, too."""


def is_data_set(value: Any) -> bool:
    """Tell whether a value is a data set of `datasets`, without importing that library."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(value, datasets.Dataset | datasets.IterableDataset)


def rows_of_object(key: str, value: Any) -> Any:
    """Return all rows of a data set of `datasets`, read in one pass where it is an `IterableDataset`; any other value
    as it is.

    Args:
        key: Name of the rows in messages.
        value: The user's value for rows.

    Raises:
        DataError: it has several splits, or a row cannot be read.
        BackendError: the source of a stream stopped.
    """
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(value, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise DataError(f"{key} is a {type(value).__name__} with the splits {', '.join(value)}: give one of them.")
    if datasets is None or not is_data_set(value):
        return value
    rows = rows_of_data(value, key)
    return [row for _, row in (rows if isinstance(value, datasets.Dataset) else _noting_its_length(key, rows))]


def _noting_its_length(key: str, stream: Iterator[RawRow]) -> Iterator[RawRow]:
    """Yield all rows of a stream. It may be endless, so a warning tells meanwhile how to cut it."""
    from lightning.pytorch.utilities import rank_zero_info  # loads torch, which the command line's first checks do not

    from lit_rl.core.progress_bar import delayed_progress

    began, times = time.monotonic(), 1
    for count, row in enumerate(delayed_progress(stream, f"reading the stream {key}", "row"), 1):
        if count >= MANY * times or time.monotonic() - began >= LONG * times:
            times *= 2  # warn at doubling intervals
            rank_zero_info(
                f"Reading the stream {key}: {count:,} rows so far, all kept in memory. A stream that does not end "
                "must be cut: hand over stream.take(N)."
            )
        yield row


def rows_of_data(data: Any, name: str, skip: int = 0) -> Iterator[RawRow]:
    """Yield rows of a data set of `datasets`, mapped into memory or streamed.

    Raises:
        DataError: a row cannot be read. The message opens with `name` and the number of the row.
        BackendError: the source of a stream stopped.
    """
    import datasets

    if isinstance(data, datasets.Dataset):
        table = data.with_format("arrow")
        for start in range(skip, len(data), BATCH):
            rows: Any = table[start : start + BATCH]
            yield from enumerate(map(row_of_table, rows.to_pylist()), start)
    else:
        yield from rows_of_stream(data.skip(skip), name, skip)


def rows_of_stream(data: IterableDataset, name: str, first: int) -> Iterator[RawRow]:
    """Yield the rows that `datasets` streams.

    Args:
        data: The data set, which begins with the first row to yield.
        name: Name of the source in messages.
        first: Number of that row in the source.

    Raises:
        DataError, BackendError: as `rows_of_data`.
    """
    streamed = iter(data)
    for index in itertools.count(first):
        try:
            row = next(streamed, None)
        except OSError as error:
            raise BackendError(f"{name}[{index}]: the source stopped: {excerpt(str(error), 200)}") from error
        except Exception as error:  # `datasets` raises errors of many classes for bad data
            raise DataError(f"{name}[{index}]: cannot be read: {excerpt(str(error), 200)}") from error
        if row is None:
            return
        yield index, row_of_table(row)


def open_saved(path: Path, *, split: str | None = None, name: str | None = None, **how: Any) -> Any:
    """Open a folder as a data set: one written by `datasets.save_to_disk`, or one that holds data files.

    Args:
        path: The folder.
        split: The split, for what has several.
        name: The configuration, for a folder of data files that has several.
        how: Further arguments of `datasets.load_dataset`; a saved folder is mapped into memory without any.

    Raises:
        DataError: the folder holds no data set, or not this split.
        ConfigError: `name` is set for a saved folder, or `split` for one that has no splits.
    """
    import datasets

    saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    if saved and name is not None:
        raise ConfigError(f"data.name={name!r} came with the saved folder {path}, which has none: remove data.name.")
    try:
        if saved:
            data = datasets.load_from_disk(str(path))
        else:
            data = datasets.load_dataset(str(path), name, split=split, **how)
    except Exception as error:  # `datasets` raises errors of many classes for bad data
        raise DataError(f"data.path={path}: cannot be read as a data set: {excerpt(str(error), 300)}") from error
    if saved and isinstance(data, datasets.Dataset) and split is not None:
        raise ConfigError(f"data.split={split!r} came with {path}, one saved data set without splits: remove it.")
    return _the_split(data, str(path), split)


def open_hub(path: str, *, split: str | None = None, name: str | None = None, **how: Any) -> Any:
    """Open a data set of the hub, or its copy in the local cache.

    Args:
        path: Id of the data set.
        split: The split, for what has several.
        name: The configuration, for what has several.
        how: Further arguments of `datasets.load_dataset`.

    Raises:
        BackendError: the hub cannot be reached, has no such data set, or refuses it.
        DataError: the data set has no such split or configuration.
    """
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    go_offline_if_unreachable()
    try:
        data = datasets.load_dataset(path, name, split=split, **how)
    except DatasetNotFoundError as error:
        raise BackendError(
            f"data.path={path}: no file or folder of this name here, and the hub has no such data set or keeps it "
            "gated; check the name, or log in with `hf auth login`."
        ) from error
    except OSError as error:
        raise BackendError(
            f"data.path={path}: no file or folder of this name here, and the hub cannot be reached (offline?): "
            f"{excerpt(str(error), 200)}. Fetch it once where there is a network: `hf download --repo-type dataset "
            f"{path}`, or copy it here and name its folder."
        ) from error
    except ValueError as error:
        raise DataError(f"data.path={path} data.name={name} data.split={split}: {excerpt(str(error), 300)}") from error
    return _the_split(data, path, split)


def _the_split(data: Any, path: str, split: str | None) -> Any:
    """Return a `Dataset`, or the requested split of a `DatasetDict`."""
    if not isinstance(data, dict):
        return data
    splits = list(data)
    if split is None and len(splits) == 1:
        return data[splits[0]]
    if split not in data:
        chosen = "data.split is not set" if split is None else f"data.split={split!r} is none of them"
        hint = did_you_mean(split, splits) if split else ""
        raise DataError(
            f"data.path={path} has the splits {', '.join(splits)}, but {chosen}. Set it to one of them.{hint}"
        )
    return data[split]
