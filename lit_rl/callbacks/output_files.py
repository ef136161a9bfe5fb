"""Files of a run folder that callbacks write and reports read, without torch: names, images, tables of samples.

Tables of samples (`samples/`) are parquet files: one for each rollout or validation at first, and a hundred of them
joined in one later on. Images are columns of such a file, or names in a file of JSON Lines: an image that is a file
stays where it is, and its absolute path is written; one that was held as bytes is written once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_rl.core.durable_files import flush, replacing
from lit_rl.core.episode import TOKENS
from lit_rl.core.errors import StorageError
from lit_rl.core.visuals import ImageRef, VideoRef, videos_in, visuals_in

if TYPE_CHECKING:
    import pyarrow


ALARMS = "alarms.jsonl"
"""The file with a line for each ring of an alarm."""

PROFILE = "profile"
"""The folder of `callbacks.Profile`, in a run's folder."""


IMAGE_FOLDER = "images"
"""The folder beside a file of JSON Lines for images that its rows held as bytes."""


# ---------------------------------------------------------------------- images in parquet


def arrow_images(values: Sequence[Any]) -> pyarrow.Array | None:
    """Return a column of images as in `datasets.Image`: structs of bytes and path, or lists of them. None: no images.

    An image that is a file has its absolute path and no bytes. A video is the list of its frames.
    """
    import pyarrow

    if not any(visuals_in(value) for value in values):
        return None
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    lists = any(isinstance(value, list | tuple) for value in values)
    for _ in range(lists + any(videos_in(value) for value in values)):
        kind = pyarrow.list_(kind)
    return pyarrow.array([_stored_value(value) for value in values], type=kind)


def _stored_value(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, ImageRef):
        if value.path is not None:
            return {"bytes": None, "path": str(value.path.resolve())}
        return {"bytes": value.data, "path": value.name}
    return [_stored_value(ref) for ref in (value.frames if isinstance(value, VideoRef) else visuals_in(value))]


def image_features(table: pyarrow.Table, names: Sequence[str]) -> pyarrow.Table:
    """Return the table with metadata by which `datasets.load_dataset("parquet", ...)` reads the columns as images."""
    import pyarrow

    def feature(kind: pyarrow.DataType) -> Any:
        return [feature(kind.value_type)] if pyarrow.types.is_list(kind) else {"_type": "Image"}

    features = {name: feature(table.schema.field(name).type) for name in names}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


# ---------------------------------------------------------------------- images in JSON Lines


class ImageWriter:
    """A writer of the images of rows in a file of JSON Lines, which refers to them by path.

    Args:
        folder: The folder of the file; images that are no files go to `images/` in it, each once, named by content.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def named(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row with paths in place of images, as a data module reads them again. Nothing is written."""
        return {name: _image_names(value) for name, value in row.items()}

    def write(self, row: Mapping[str, Any]) -> None:
        """Write the images of a row that are no files, unless they exist.

        Raises:
            StorageError: one could not be written.
        """
        shown = [ref for value in row.values() for ref in visuals_in(value)]
        images = (image for ref in shown for image in (ref.frames if isinstance(ref, VideoRef) else (ref,)))
        for image in (image for image in images if image.path is None):
            path, data = self._folder / _image_names(image), image.read()
            if path.exists():  # named by content
                continue
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = f".{path.name}.{os.getpid()}.partial"  # ranks may write one image at once
                with replacing(path, partial) as unfinished:
                    unfinished.write_bytes(data)
            except OSError as error:
                raise StorageError(f"The image {path} could not be written: {error}.") from error


def _image_names(value: Any) -> Any:
    if isinstance(value, ImageRef):
        return f"{IMAGE_FOLDER}/{value.digest}.{value.encoding}" if value.path is None else str(value.path.resolve())
    if isinstance(value, VideoRef):
        frames = [_image_names(frame) for frame in value.frames]
        return frames if value.fps is None else {"frames": frames, "fps": value.fps}
    return [_image_names(each) for each in value] if visuals_in(value) else value


# ---------------------------------------------------------------------- tables of samples


JOINED = 100
"""Number of files that are joined, once there is a newer one of their kind."""

_STEP = "[0-9]" * 8
SAMPLE_FILES = (
    f"step_{_STEP}.parquet",
    f"step_{_STEP}-{_STEP}.parquet",
    f"tokens_{_STEP}.parquet",
    f"tokens_{_STEP}-{_STEP}.parquet",
    f"val_{_STEP}_t*.parquet",
    f"val_{_STEP}-{_STEP}_t*.parquet",
)
"""Patterns of the names that a run gives to sample files; other files beside them are the user's."""

_TABLES = b"lit_rl.tables"
"""Metadata key of a joined file: each row group's name as a file of its own, and the columns that this lacked."""

_HUGGINGFACE = b"huggingface"


@dataclass(frozen=True)
class SampleTable:
    """The completions of one rollout, validation or replay, in a file of their own or in a joined one."""

    name: str
    """The stem of its own file: `step_00000042`, `tokens_00000040`, `val_00000010_t0`."""
    path: Path
    """The file."""
    place: int | None = None
    """The row group in a joined file; None in a file of its own."""
    lacks: frozenset[str] = frozenset()
    """Columns of a joined file that only other tables have."""

    def columns(self) -> list[str]:
        """Return the names of the columns.

        Raises:
            OSError, pyarrow.ArrowException: the file cannot be read, or is not parquet.
        """
        import pyarrow.parquet

        return [name for name in pyarrow.parquet.read_schema(self.path).names if name not in self.lacks]

    def read(self, columns: Sequence[str] | None = None) -> pyarrow.Table:
        """Read all columns, or those that are named.

        Raises:
            OSError, pyarrow.ArrowException: likewise.
        """
        import pyarrow.parquet

        wanted = self.columns() if columns is None else list(columns)
        with pyarrow.parquet.ParquetFile(self.path) as file:
            table = file.read(wanted) if self.place is None else file.read_row_group(self.place, wanted)
        return table.select(wanted)


def list_tables(folder: Path) -> list[SampleTable]:
    """Return the tables of a folder, by name; one that is in two files, as a run was killed while joining, once."""
    found: dict[str, SampleTable] = {}
    for path in sorted(folder.glob("*.parquet"), key=lambda path: "-" not in path.stem):  # joined ones first
        if path.is_file():
            found |= {table.name: table for table in _tables_of(path)}
    return [found[name] for name in sorted(found)]


def _tables_of(path: Path) -> Iterator[SampleTable]:
    import pyarrow
    import pyarrow.parquet

    kind = _FileName.of(path.stem)
    try:
        noted = pyarrow.parquet.read_schema(path).metadata[_TABLES] if kind is not None and kind.joined else None
    except (OSError, pyarrow.ArrowException, KeyError, TypeError):
        noted = None  # damaged, or the user's: reading it raises
    if noted is None:
        yield SampleTable(path.stem, path)
        return
    for place, (name, lacks) in enumerate(json.loads(noted)):
        yield SampleTable(name, path, place, frozenset(lacks))


class _FileName(NamedTuple):
    """The parts of a sample file's name."""

    series: tuple[str, str]
    """The series: rollouts, their tokens, or the validations of one set and decoding."""
    first: int
    last: int
    joined: bool

    @classmethod
    def of(cls, stem: str) -> _FileName | None:
        match = re.fullmatch(r"(step|tokens|val)_(\d{8})(?:-(\d{8}))?(_t.*)?", stem, re.DOTALL)
        if match is None:
            return None
        name, first, last, validation = match.groups()
        return cls((name, validation or ""), int(first), int(last or first), last is not None)


def _files_of_run(folder: Path) -> Iterator[tuple[Path, _FileName]]:
    """Yield the files that a run wrote, in the order of their steps."""
    for path in sorted(path for pattern in SAMPLE_FILES for path in folder.glob(pattern)):
        kind = _FileName.of(path.stem)
        if kind is not None and path.is_file():
            yield path, kind


# ---------------------------------------------------------------------- writing


def write_table(table: dict[str, list[Any]], path: Path) -> None:
    """Write a table of samples, whole or not at all; then join the older ones of its kind beyond `JOINED`.

    Raises:
        OSError, pyarrow.ArrowException: it cannot be written.
    """
    with replacing(path, f"{path.stem}.partial") as partial:
        write_parquet(table, partial)
    kind = _FileName.of(path.stem)
    alike = [
        other
        for other, found in _files_of_run(path.parent)
        if kind and found.series == kind.series and not found.joined
    ]
    if len(alike) > JOINED:
        _join(alike[:JOINED])


def write_parquet(table: dict[str, list[Any]], path: Path) -> None:
    """Write a table of samples. Equal bytes of images are stored once."""
    import pyarrow

    images = {key: found for key, values in table.items() if (found := arrow_images(values)) is not None}
    columns = {
        key: images[key] if key in images else _column_of_one_type(values, lists=key.startswith(TOKENS))
        for key, values in table.items()
    }
    _write_arrow(pyarrow.table(columns), list(images), path)


def _write_arrow(table: pyarrow.Table, images: Sequence[str], path: Path) -> None:
    import pyarrow.parquet

    written = image_features(table, images) if images else table
    pyarrow.parquet.write_table(written, path, **_write_options(images))


def _write_options(images: Sequence[str]) -> dict[str, Any]:
    """Return writer options: by default a dictionary of values ends at 1 MiB, and later values are written in full."""
    return {"dictionary_pagesize_limit": 1 << 30} if images else {}


def _column_of_one_type(values: list[Any], *, lists: bool = False) -> list[Any]:
    """Return a column of one type: numbers as they are, everything else as text (messages as JSON), or as `lists`."""
    import pyarrow

    try:
        kind = pyarrow.array(values).type
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):
        kind = None  # mixed types, a number of more than 64 bits, half a surrogate pair
    if kind is None or (pyarrow.types.is_nested(kind) and not lists):
        return [json.dumps(value, default=str) for value in values]
    return values


# ---------------------------------------------------------------------- joining and splitting


def _join(paths: Sequence[Path]) -> None:
    """Write the tables of some files as row groups of one file with all their columns, and remove the files."""
    import pyarrow
    import pyarrow.parquet

    schemas = [pyarrow.parquet.read_schema(path) for path in paths]
    names = list(dict.fromkeys(name for schema in schemas for name in schema.names))
    images = sorted({name for schema in schemas for name in _image_columns(schema)})
    whole = pyarrow.schema(
        [
            (name, _common_type([schema.field(name).type for schema in schemas if name in schema.names]))
            for name in names
        ]
    )
    if images:
        whole = image_features(whole.empty_table(), images).schema
    noted = [[path.stem, [name for name in names if name not in schema.names]] for path, schema in zip(paths, schemas)]
    whole = whole.with_metadata({**(whole.metadata or {}), _TABLES: json.dumps(noted).encode()})

    first, last = _FileName.of(paths[0].stem), _FileName.of(paths[-1].stem)
    assert first is not None and last is not None
    name, suffix = first.series
    target = paths[0].with_name(f"{name}_{first.first:08d}-{last.last:08d}{suffix}.parquet")
    with replacing(target, f"{target.stem}.partial") as partial:
        with pyarrow.parquet.ParquetWriter(partial, whole, **_write_options(images)) as writer:
            for path in paths:
                table = _cast_to_schema(whole, pyarrow.parquet.ParquetFile(path).read())
                writer.write_table(table, row_group_size=max(1, len(table)))
        if pyarrow.parquet.ParquetFile(partial).num_row_groups != len(paths):
            raise ValueError(f"{len(paths)} tables of {target.name} are not as many row groups")
        flush(partial)
    for path in paths:
        path.unlink()


def _image_columns(schema: pyarrow.Schema) -> list[str]:
    noted = (schema.metadata or {}).get(_HUGGINGFACE)
    return list(json.loads(noted)["info"]["features"]) if noted else []


def _common_type(kinds: Sequence[pyarrow.DataType]) -> pyarrow.DataType:
    """Return a type that holds all values: floats for integers and floats; text where nothing else fits."""
    import pyarrow

    try:
        schemas = [pyarrow.schema([("column", kind)]) for kind in dict.fromkeys(kinds)]
        return pyarrow.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pyarrow.ArrowException:
        return pyarrow.string()


def _cast_to_schema(whole: pyarrow.Schema, table: pyarrow.Table) -> pyarrow.Table:
    """Return the table with the columns of a joined file; other values that become text are JSON."""
    import pyarrow

    columns = []
    for field in whole:
        if field.name not in table.column_names:
            columns.append(pyarrow.nulls(len(table), field.type))
            continue
        column = table.column(field.name)
        if pyarrow.types.is_string(field.type) and not (
            pyarrow.types.is_string(column.type) or pyarrow.types.is_null(column.type)
        ):
            texts = (None if value is None else json.dumps(value, default=str) for value in column.to_pylist())
            column = pyarrow.array(texts, pyarrow.string())
        columns.append(column.cast(field.type))
    return pyarrow.Table.from_arrays(columns, schema=whole)


def restore_sample_files(folder: Path, noted: Collection[str]) -> None:
    """Restore the tables that existed when a checkpoint noted these file names.

    Files that were joined since are split again, so that a resumed run joins the same files as an uninterrupted one.

    Raises:
        StorageError: a joined file is damaged, or cannot be written.
    """
    last: dict[tuple[str, str], int] = {}
    for kind in (_FileName.of(Path(name).stem) for name in noted):
        if kind is not None:
            last[kind.series] = max(kind.last, last.get(kind.series, -1))
    for pattern in SAMPLE_FILES:
        for path in folder.glob(str(Path(pattern).with_suffix(".partial"))):
            path.unlink()
    for path, kind in list(_files_of_run(folder)):
        if kind.joined and path.name not in noted:
            _split_joined(path, last.get(kind.series, -1))
    kept = {table.name for path, kind in _files_of_run(folder) if kind.joined for table in _tables_of(path)}
    for path, kind in list(_files_of_run(folder)):
        if not kind.joined and (kind.first > last.get(kind.series, -1) or path.stem in kept):
            path.unlink()


def _split_joined(path: Path, last: int) -> None:
    """Split a joined file into files of its tables up to a step, and remove it.

    Raises:
        StorageError: it is damaged, or cannot be written.
    """
    import pyarrow.parquet

    try:
        images = _image_columns(pyarrow.parquet.read_schema(path))
        for table in _tables_of(path):
            kind, own = _FileName.of(table.name), path.with_name(f"{table.name}.parquet")
            if kind is None or kind.joined or kind.first > last or own.exists():
                continue
            shown = [name for name in images if name not in table.lacks]
            with replacing(own, f"{own.stem}.partial") as partial:
                _write_arrow(table.read().replace_schema_metadata(None), shown, partial)
                flush(partial)
    except (OSError, pyarrow.ArrowException) as error:
        raise StorageError(
            f"{path} holds rollouts from before the checkpoint and cannot be taken apart ({error}). If it is damaged, "
            "remove it: the run goes on without those samples."
        ) from error
    path.unlink()
