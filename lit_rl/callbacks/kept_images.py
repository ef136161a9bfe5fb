"""Images and frames of rows in a run's output files: columns of a parquet file, and names in JSON Lines.

An image that is a file stays where it is, and its absolute path is written. One that was held as bytes is written once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_rl.durable import replacing
from lit_rl.errors import StorageError
from lit_rl.images import ImageRef
from lit_rl.videos import VideoRef, Visual, videos_in, visuals_in

if TYPE_CHECKING:
    import pyarrow

FOLDER = "images"
"""The folder beside a file of JSON Lines for images that its rows held as bytes."""


# ---------------------------------------------------------------------- parquet


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
    return pyarrow.array([_plain(value) for value in values], type=kind)


def _plain(value: Any) -> Any:
    if value is None:
        return None
    return _stored(value) if isinstance(value, ImageRef | VideoRef) else [_stored(ref) for ref in visuals_in(value)]


def _stored(ref: Visual) -> Any:
    if isinstance(ref, VideoRef):
        return [_stored(frame) for frame in ref.frames]
    if ref.path is not None:
        return {"bytes": None, "path": str(ref.path.resolve())}
    return {"bytes": ref.data, "path": ref.name}


def image_features(table: pyarrow.Table, names: Sequence[str]) -> pyarrow.Table:
    """Return the table with metadata by which `datasets.load_dataset("parquet", ...)` reads the columns as images."""
    import pyarrow

    def feature(kind: pyarrow.DataType) -> Any:
        return [feature(kind.value_type)] if pyarrow.types.is_list(kind) else {"_type": "Image"}

    features = {name: feature(table.schema.field(name).type) for name in names}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


# ---------------------------------------------------------------------- JSON Lines


class KeptImages:
    """A writer of the images of rows in a file of JSON Lines, which refers to them by path.

    Args:
        folder: The folder of the file; images that are no files go to `images/` in it, each once, named by content.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def named(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row with paths in place of images, as a data module reads them again. Nothing is written."""
        return {name: _named(value) for name, value in row.items()}

    def write(self, row: Mapping[str, Any]) -> None:
        """Write the images of a row that are no files, unless they exist.

        Raises:
            StorageError: one could not be written.
        """
        shown = [ref for value in row.values() for ref in visuals_in(value)]
        images = (image for ref in shown for image in (ref.frames if isinstance(ref, VideoRef) else (ref,)))
        for image in (image for image in images if image.path is None):
            _write(self._folder / _named(image), image.read())


def _named(value: Any) -> Any:
    if isinstance(value, ImageRef):
        return f"{FOLDER}/{value.digest}.{value.encoding}" if value.path is None else str(value.path.resolve())
    if isinstance(value, VideoRef):
        frames = [_named(frame) for frame in value.frames]
        return frames if value.fps is None else {"frames": frames, "fps": value.fps}
    return [_named(each) for each in value] if visuals_in(value) else value


def _write(path: Path, data: bytes) -> None:
    if path.exists():  # named by content
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, f".{path.name}.{os.getpid()}.partial") as partial:  # ranks may write one image at once
            partial.write_bytes(data)
    except OSError as error:
        raise StorageError(f"The image {path} could not be written: {error}.") from error
