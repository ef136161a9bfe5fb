"""A video of a row: its frames, which are images, and how many of them a second has.

Nothing decodes a video file here, and no frame is left out or made up: what a row lists is what a model sees.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_rl.images import THUMBNAIL, ImageRef, images_of, refs_of

if TYPE_CHECKING:
    from PIL.Image import Image

COLUMNS = ("video", "videos")
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
    held = (columns.get(name) for name in COLUMNS)
    videos = tuple(ref for values in held if values is not None for ref in videos_in(values[row]))
    return (*images_of(columns, row), *videos)
