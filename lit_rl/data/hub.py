"""Data sets that the `datasets` library keeps: saved folders, folders of data files, and the hub.

No code that comes with a data set is ever run: `datasets` 4 and later has no loading scripts.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_rl.data.checks import excerpt
from lit_rl.data.raw_rows import row_of_table
from lit_rl.errors import BackendError, ConfigError, DataError, did_you_mean
from lit_rl.offline import read_the_cache_alone_where_there_is_no_hub

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    GivenRows = list[dict[str, Any]] | Dataset | IterableDataset
    """Rows that are handed over in Python. Configs that are read from files know lists alone."""
else:
    GivenRows = list[dict[str, Any]]


MANY = 1_000_000
"""Rows of a stream after which the user is warned that it may be endless."""
LONG = 30.0
"""Seconds of reading after which the user is warned, too."""


def is_data_set(given: Any) -> bool:
    """Tell whether a value is a data set of `datasets`, without importing that library."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(given, datasets.Dataset | datasets.IterableDataset)


def rows_of_object(key: str, given: Any) -> Any:
    """Return all rows of a data set of `datasets`, read in one pass where it is an `IterableDataset`; any other value
    as it is.

    Args:
        key: Name of the rows in messages.
        given: The user's value for rows.

    Raises:
        DataError: it has several splits, or a row cannot be read.
    """
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(given, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise DataError(f"{key} is a {type(given).__name__} with the splits {', '.join(given)}: give one of them.")
    if datasets is None or not is_data_set(given):
        return given
    try:
        rows = given.to_list() if isinstance(given, datasets.Dataset) else _all_of_stream(key, given)
    except Exception as error:  # `datasets` raises errors of many classes for bad data
        raise DataError(f"{key}: cannot be read: {excerpt(str(error), 300)}") from error
    return [row_of_table(row) for row in rows]


def _all_of_stream(key: str, stream: IterableDataset) -> list[dict[str, Any]]:
    """Return all rows of a stream. It may be endless, so a warning tells meanwhile how to cut it."""
    from lightning.pytorch.utilities import rank_zero_info  # loads torch, which the command line's first checks do not

    from lit_rl.long_waits import counted

    rows, began, times = [], time.monotonic(), 1
    for row in counted(stream, f"reading the stream {key}", "row"):
        rows.append(dict(row))
        if len(rows) >= MANY * times or time.monotonic() - began >= LONG * times:
            times *= 2  # warn at doubling intervals
            rank_zero_info(
                f"Reading the stream {key}: {len(rows):,} rows so far, all kept in memory. A stream that does not end "
                "must be cut: hand over stream.take(N)."
            )
    return rows


def from_saved(path: Path, *, split: str | None = None, name: str | None = None) -> list[dict[str, Any]]:
    """Return all rows of the data set that `open_saved` opens."""
    return [row_of_table(row) for row in open_saved(path, split=split, name=name).to_list()]


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


def from_hub(path: str, *, split: str | None = None, name: str | None = None) -> list[dict[str, Any]]:
    """Return all rows of the data set that `open_hub` opens."""
    return [row_of_table(row) for row in open_hub(path, split=split, name=name).to_list()]


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

    read_the_cache_alone_where_there_is_no_hub()
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
        came = "no data.split came" if split is None else f"data.split={split!r} is none of them"
        hint = did_you_mean(split, splits) if split else ""
        raise DataError(f"data.path={path} has the splits {', '.join(splits)} and {came}.{hint}")
    return data[split]
