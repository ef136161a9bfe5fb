"""A value of a row becomes a reference to an image. Nothing is fetched, and no string reaches a processor.

Transformers' processors open any path and any URL that they are given. What a data set says is not trusted with that:
only bytes, and files below the data set's own folder or at an absolute path, become images.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.errors import DataError, did_you_mean
from lit_rl.images import ImageRef, as_png, as_rgb, digest_of, is_pillow, pillow

MAX_IMAGE_PIXELS = 40_000_000
"""Width times height of an image that a data set may hold, by default: 120 MB as RGB."""

MOST_IMAGE_PIXELS = 178_956_970
"""The largest image that Pillow opens, in pixels."""

LONGEST_SIDE = 200
"""Times the shorter side: what processors of the Qwen family take."""

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
ALLOWED = "a path, bytes, a data: URI, {bytes, path} or a PIL image"


def image_of(value: Any, where: str, *, folder: Path | None = None, max_pixels: int = MAX_IMAGE_PIXELS) -> ImageRef:
    """Return a reference to the image that a row names or holds; its header is read, its pixels are not.

    Args:
        value: A path (relative to `folder`), encoded bytes, a ``data:`` URI, a mapping with ``bytes`` or ``path`` as
            `datasets.Image(decode=False)` gives it, a PIL image, or a reference.
        where: The row, for messages.
        folder: Folder of the data set's file. None: relative paths have no meaning.
        max_pixels: Width times height, at most.

    Raises:
        DataError: it is none of these, cannot be read, is no image, is animated, or its size is out of range.
        BackendError: Pillow is not installed.
    """
    if isinstance(value, ImageRef):
        return value
    if isinstance(value, str | Path):
        return _of_text(str(value), where, folder, max_pixels)
    if isinstance(value, bytes | bytearray | memoryview):
        return _of_bytes(bytes(value), "bytes", where, max_pixels)
    if isinstance(value, Mapping) and value.keys() <= {"bytes", "path"}:
        return _of_mapping(value, where, folder, max_pixels)
    if is_pillow(value):
        return _of_pillow(value, where, max_pixels)
    raise DataError(f"{where}: the image is {excerpt(repr(value))} ({type(value).__name__}); allowed are {ALLOWED}.")


def _of_mapping(value: Mapping[str, Any], where: str, folder: Path | None, max_pixels: int) -> ImageRef:
    data, path = value.get("bytes"), value.get("path")
    if data is not None:
        return _of_bytes(bytes(data), str(path or "bytes"), where, max_pixels)
    if isinstance(path, str):
        return _of_text(path, where, folder, max_pixels)
    raise DataError(f"{where}: the image has neither bytes nor a path.")


def _of_text(text: str, where: str, folder: Path | None, max_pixels: int) -> ImageRef:
    if text.startswith("data:"):
        return _of_bytes(_decoded(text, where), "a data: URI", where, max_pixels)
    if _URL.match(text):
        raise DataError(
            f"{where}: the image {excerpt(text)} is a URL, and nothing is fetched while training. Download it first, "
            "and give the file."
        )
    path = _path(text, where, folder)
    try:
        data = path.read_bytes()
    except OSError as error:
        beside = path.parent.iterdir() if path.parent.is_dir() and not path.exists() else ()
        near = did_you_mean(path.name, (each.name for each in beside))
        raise DataError(f"{where}: the image {path} cannot be read: {error.strerror or error}.{near}") from error
    return _checked(ImageRef(text, digest_of(data), 0, 0, path=path), data, where, max_pixels)


def _path(text: str, where: str, folder: Path | None) -> Path:
    path = Path(text).expanduser()
    if ".." in path.parts:
        raise DataError(
            f"{where}: the image {excerpt(text)} lies outside the data's folder ('..'). Put it below the folder, or "
            "give its absolute path."
        )
    if path.is_absolute():
        return path
    if folder is None:
        raise DataError(
            f"{where}: the image {excerpt(text)} is a relative path, and these rows come from no file. Give an "
            "absolute path, or bytes."
        )
    return folder / path


def _decoded(uri: str, where: str) -> bytes:
    head, comma, payload = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise DataError(f"{where}: the image {excerpt(uri, 40)} is a data: URI that is not base64.")
    try:
        return base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise DataError(f"{where}: the image {excerpt(uri, 40)} is no sound base64: {error}.") from error


def _of_pillow(image: Any, where: str, max_pixels: int) -> ImageRef:
    """Encode a PIL image as PNG of the pixels that will be read, so that every mode can be stored."""
    _check_size(image.width, image.height, "a PIL image", where, max_pixels)
    if getattr(image, "is_animated", False):
        raise _animated("a PIL image", where)
    try:
        encoded = as_png(as_rgb(image))
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: the image, a PIL image, cannot be used: {error}.") from error
    return _of_bytes(encoded, "a PIL image", where, max_pixels)


def _of_bytes(data: bytes, name: str, where: str, max_pixels: int) -> ImageRef:
    return _checked(ImageRef(name, digest_of(data), 0, 0, data=data), data, where, max_pixels)


def _checked(ref: ImageRef, data: bytes, where: str, max_pixels: int) -> ImageRef:
    """Return the reference with the size from the image's header, after checking it."""
    module = pillow()
    try:
        with warnings.catch_warnings():  # our own limit is asked first
            warnings.simplefilter("ignore", module.DecompressionBombWarning)
            image = module.open(io.BytesIO(data))
    except module.DecompressionBombError as error:
        raise DataError(f"{where}: the image {ref.name} is too large: {error} Shrink it.") from error
    except (OSError, SyntaxError, ValueError) as error:
        kind = "is empty" if not data else f"is no image that Pillow knows: it begins with {excerpt(repr(data[:8]))}"
        raise DataError(f"{where}: the image {ref.name} {kind}.") from error
    _check_size(image.width, image.height, ref.name, where, max_pixels)
    if getattr(image, "is_animated", False):
        raise _animated(ref.name, where)
    return ImageRef(ref.name, ref.digest, image.width, image.height, path=ref.path, data=ref.data)


def _animated(name: str, where: str) -> DataError:
    return DataError(f"{where}: the image {name} is animated. Save the frame that is meant as an image of its own.")


def _check_size(width: int, height: int, name: str, where: str, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise DataError(
            f"{where}: the image {name} has {width} x {height} pixels, data.max_image_pixels={max_pixels}. Shrink it, "
            "or raise the limit."
        )
    if max(width, height) > LONGEST_SIDE * min(width, height):
        raise DataError(
            f"{where}: the image {name} has {width} x {height} pixels: one side is over {LONGEST_SIDE} times the "
            "other, which processors refuse. Cut or pad it."
        )
