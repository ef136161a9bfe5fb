"""Images of rows in the files that a run writes: columns of a parquet file, and names in JSON Lines.

An image that is a file stays where it is, and its absolute path is written. One that was held as bytes is written once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_rl.errors import StorageError
from lit_rl.images import ImageRef, refs_of

if TYPE_CHECKING:
    import pyarrow

FOLDER = "images"
"""Beside a file of JSON Lines: the images that its rows held as bytes."""


# ---------------------------------------------------------------------- parquet


def arrow_images(values: Sequence[Any]) -> pyarrow.Array | None:
    """A column of images as `datasets.Image` has it: a struct of bytes and path, or lists of them. None: no images.

    An image that is a file has its absolute path and no bytes.
    """
    import pyarrow

    if not any(refs_of(value) for value in values):
        return None
    one = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    if any(isinstance(value, list | tuple) for value in values):
        lists = [None if value is None else [_plain(ref) for ref in refs_of(value)] for value in values]
        return pyarrow.array(lists, type=pyarrow.list_(one))
    return pyarrow.array([None if value is None else _plain(value) for value in values], type=one)


def _plain(ref: ImageRef) -> dict[str, Any]:
    if ref.path is not None:
        return {"bytes": None, "path": str(ref.path.resolve())}
    return {"bytes": ref.data, "path": ref.name}


def image_features(table: pyarrow.Table, names: Sequence[str]) -> pyarrow.Table:
    """The table with a note by which `datasets.load_dataset("parquet", ...)` gives the named columns back as images."""
    import pyarrow

    image = {"_type": "Image"}
    features = {name: [image] if pyarrow.types.is_list(table.schema.field(name).type) else image for name in names}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


# ---------------------------------------------------------------------- JSON Lines


class KeptImages:
    """Gives images the names by which rows of JSON Lines in a folder have them, and writes those that are no files.

    Args:
        folder: Of the file of JSON Lines; images are written to `images/` in it, each once, named by what it holds.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def named(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with paths in place of images, as a data module reads them again. Nothing is written."""
        return {name: _named(value) for name, value in row.items()}

    def write(self, row: Mapping[str, Any]) -> None:
        """Write the images of a row that are no files, where they are not there yet.

        Raises:
            StorageError: one could not be written.
        """
        for ref in (ref for value in row.values() for ref in refs_of(value) if ref.path is None):
            _write(self._folder / _named(ref), ref.read())


def _named(value: Any) -> Any:
    if isinstance(value, ImageRef):
        return f"{FOLDER}/{value.digest}.{value.encoding}" if value.path is None else str(value.path.resolve())
    return [_named(each) for each in value] if refs_of(value) else value


def _write(path: Path, data: bytes) -> None:
    if path.exists():  # named by what it holds
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # ranks may write the same image at once
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StorageError(f"The image {path} could not be written: {error}.") from error
