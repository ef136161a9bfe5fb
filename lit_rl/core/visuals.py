"""References to the images and videos of a row, decoded on demand.

A reference holds a path or the encoded bytes, never pixels: a data set of decoded images would fill the memory.
Pillow is imported where an image is opened, so a run without images does not need it. A video is its frames,
which are images, and their rate: no video file is decoded here, and no frame is dropped or interpolated.
"""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_rl.core.errors import BackendError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image


IMAGE_COLUMNS = ("image", "images")
"""Columns of a row that hold its images: one, or a list."""

WHITE = (255, 255, 255)

THUMBNAIL = 96
"""Longest side, in pixels, of an image in tables for people."""


@dataclass(frozen=True)
class ImageRef:
    """One image, as passed to rewards and processors. Equal where names and bytes are.

    Args:
        name: Its name in messages: its path, or the source of its bytes.
        digest: BLAKE2b of its encoded bytes, 32 hexadecimal digits.
        width: In pixels, as its header says: before EXIF turns it.
        height: Likewise.
        path: Its file; None where the bytes are held.
        data: Its encoded bytes; None where they are read from the file when they are needed.
    """

    name: str
    digest: str
    width: int
    height: int
    path: Path | None = field(default=None, compare=False, repr=False)
    data: bytes | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.name} {self.digest}"

    @classmethod
    def held(cls, name: str, width: int, height: int, data: bytes) -> ImageRef:
        """Make a reference that holds its bytes."""
        return cls(name, digest_of(data), width, height, data=data)

    def read(self) -> bytes:
        """Return its encoded bytes.

        Raises:
            DataError: its file is gone, or holds other bytes than when the data were read.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.name}: the image cannot be read: {error.strerror or error}.") from error
        if digest_of(data) != self.digest:
            raise DataError(f"{self.name}: the image has changed since the data were read.")
        return data

    def open(self) -> Image:
        """Return its pixels in mode RGB, turned as EXIF says.

        Transparent pixels are laid over white; 16-bit greys are divided by 257.

        Raises:
            DataError: it cannot be read, or its bytes are damaged.
        """
        data = self.read()
        try:
            return as_rgb(pillow().open(io.BytesIO(data)))
        except (OSError, SyntaxError, ValueError) as error:  # Pillow's words for damaged bytes
            raise DataError(f"{self.name}: the image is damaged: {error}.") from error

    def thumbnail(self, side: int = THUMBNAIL) -> Image:
        """Return its pixels in mode RGB, shrunk where a side is longer than `side`, never enlarged.

        Raises:
            DataError: as `open`.
        """
        image = self.open()
        image.thumbnail((side, side))
        return image

    @property
    def encoding(self) -> str:
        """The encoding of its bytes, as a file ending: `png`, `jpeg`."""
        return str(pillow().open(io.BytesIO(self.read())).format).lower()


def refs_of(value: Any) -> tuple[ImageRef, ...]:
    """Return the images in a value of a column; none where it is something else."""
    many = value if isinstance(value, list | tuple) else (value,)
    return tuple(each for each in many if isinstance(each, ImageRef))


def is_pillow(value: Any) -> bool:
    """Tell whether a value is a PIL image, without importing Pillow."""
    return hasattr(value, "tobytes") and hasattr(value, "mode")


def as_png(image: Image, compress_level: int = 6) -> bytes:
    """Return the image as a PNG file, which is lossless. A lower level, from 0 to 9, is faster and larger."""
    encoded = io.BytesIO()
    image.save(encoded, "PNG", compress_level=compress_level)
    return encoded.getvalue()


def digest_of(data: bytes) -> str:
    """Return the digest of encoded bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def pillow() -> Any:
    """Import and return the module ``PIL.Image``.

    Raises:
        BackendError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise BackendError("Images need Pillow: pip install 'lit-rl[vision]'.") from error
    return Image


def as_rgb(image: Image) -> Image:
    """Convert an image of any mode to RGB, by one rule for all of lit_rl.

    Raises:
        ValueError: its pixels are floating-point numbers, for which white is undefined.
    """
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # Pillow would cut 16 bits at 255: all white
        import numpy as np

        grey = np.asarray(image).astype(np.int64).clip(0, 65535)
        image = pillow().fromarray(((grey + 128) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = pillow().new("RGBA", image.size, (*WHITE, 255))
        white.alpha_composite(image)
        image = white
    return image.convert("RGB")


VIDEO_COLUMNS = ("video", "videos")
"""Columns of a row that hold its videos: one, or a list."""


@dataclass(frozen=True)
class VideoRef:
    """One video, as passed to rewards and processors. Equal where names, bytes and times are.

    Args:
        frames: In the order in which they are shown, one or more, of one size.
        fps: Frames per second. None: unknown, and models that read times cannot show it.
    """

    frames: tuple[ImageRef, ...]
    fps: float | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.digest}"

    @property
    def name(self) -> str:
        """Its name in messages: its first frame, and the number of frames."""
        return f"{self.frames[0].name} ({len(self.frames)} frames)"

    @functools.cached_property
    def digest(self) -> str:
        """BLAKE2b of what its frames hold, and of its time; 32 hexadecimal digits."""
        said = " ".join([*(frame.digest for frame in self.frames), str(self.fps)])
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    @property
    def width(self) -> int:
        """Width of a frame in pixels, by its header."""
        return self.frames[0].width

    @property
    def height(self) -> int:
        """Height of a frame in pixels, by its header."""
        return self.frames[0].height

    @property
    def path(self) -> Path | None:
        """The file of its first frame; None where its bytes are held."""
        return self.frames[0].path

    def open(self) -> list[Image]:
        """Return the pixels of its frames: `ImageRef.open` of each.

        Raises:
            DataError: a frame cannot be read, or its bytes are damaged.
        """
        return [frame.open() for frame in self.frames]

    def thumbnail(self, side: int = THUMBNAIL) -> Image:
        """Return `ImageRef.thumbnail` of its first frame.

        Raises:
            DataError: as `open`.
        """
        return self.frames[0].thumbnail(side)


Visual = ImageRef | VideoRef
"""An image or a video of a prompt."""


def videos_in(value: Any) -> tuple[VideoRef, ...]:
    """Return the videos in a value of a column; none where it is something else."""
    many = value if isinstance(value, list | tuple) else (value,)
    return tuple(each for each in many if isinstance(each, VideoRef))


def visuals_in(value: Any) -> tuple[Visual, ...]:
    """Return the images and videos in a value of a column, which holds one kind of them."""
    return (*refs_of(value), *videos_in(value))


def shown_in(columns: Mapping[str, Sequence[Any] | None], row: int) -> tuple[Visual, ...]:
    """Return the images of a row from columns by name, in display order, then its videos."""
    images = [refs_of(values[row]) for name in IMAGE_COLUMNS if (values := columns.get(name)) is not None]
    videos = [videos_in(values[row]) for name in VIDEO_COLUMNS if (values := columns.get(name)) is not None]
    return tuple(each for found in (*images, *videos) for each in found)
