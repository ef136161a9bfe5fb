"""A value of a row becomes a reference to a video: a list of frames, each of which is read as an image is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.data.images import MAX_IMAGE_PIXELS, image_of
from lit_rl.errors import DataError
from lit_rl.images import ImageRef, is_pillow
from lit_rl.videos import VideoRef

_KEYS = ("frames", "fps")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_ALLOWED = 'a list of frames, or {"frames": [...], "fps": 2.0}'
_CUT = (
    "Cut it into frames first, as with `ffmpeg -i clip.mp4 -vf fps=2 clip/%04d.png`, and list these files: "
    '{"frames": ["clip/0001.png", ...], "fps": 2}'
)


def video_of(value: Any, where: str, *, folder: Path | None = None, max_pixels: int = MAX_IMAGE_PIXELS) -> VideoRef:
    """Return a reference to the video that a row lists; headers of its frames are read, pixels are not.

    Args:
        value: A list of frames, each anything that `lit_rl.data.images.image_of` reads; a mapping of ``frames`` and
            ``fps``, frames a second; or a reference.
        where: The row, for messages.
        folder: Folder of the data set's file. None: relative paths have no meaning.
        max_pixels: Width times height of a frame, at most.

    Raises:
        DataError: it is none of these, has no frame or frames of several sizes, or a frame cannot be used.
        BackendError: Pillow is not installed.
    """
    if isinstance(value, VideoRef):
        return value
    fps = None
    if isinstance(value, Mapping) and "frames" in value:
        if unknown := [key for key, held in value.items() if key not in _KEYS and held is not None]:
            raise DataError(f"{where}: the video has the keys {', '.join(map(str, unknown))}; allowed are frames, fps.")
        value, fps = value["frames"], _rate(value.get("fps"), where)
    if _is_file(value):
        raise DataError(f"{where}: the video {excerpt(repr(value))} is a file, and nothing here decodes one. {_CUT}.")
    if not isinstance(value, Sequence):
        kind = "one image" if isinstance(value, ImageRef) or is_pillow(value) else excerpt(repr(value))
        raise DataError(f"{where}: the video is {kind} ({type(value).__name__}); allowed are {_ALLOWED}.")
    if not value:
        raise DataError(f"{where}: the video has no frame. List its frames, or give null where a row shows no video.")
    frames = [
        image_of(frame, f"{where}: frame {number} of the video", folder=folder, max_pixels=max_pixels)
        for number, frame in enumerate(value)
    ]
    _check_sizes(frames, where)
    return VideoRef(tuple(frames), fps)


def lists_frames(value: Any) -> bool:
    """Tell whether a value can be nothing but videos: text and numbers in a column of that name may be anything."""
    if isinstance(value, VideoRef) or (isinstance(value, Mapping) and "frames" in value):
        return True
    return isinstance(value, list | tuple) and any(_is_frame(each) or lists_frames(each) for each in value)


def _is_frame(value: Any) -> bool:
    """Tell whether a value in a list can be nothing but an image: names of things are text as well."""
    if isinstance(value, Mapping):
        return bool(value) and value.keys() <= {"bytes", "path"}
    if isinstance(value, str):
        return value.startswith("data:image/") or Path(value).suffix.lower() in _SUFFIXES
    return isinstance(value, bytes | ImageRef) or is_pillow(value)


def _is_file(value: Any) -> bool:
    """Tell whether a value is a path or address, the bytes of a file, or an item of `datasets.Video(decode=False)`."""
    if isinstance(value, Mapping):
        return bool(value) and value.keys() <= {"bytes", "path", "url"}
    return isinstance(value, str | Path | bytes | bytearray | memoryview)


def _rate(value: Any, where: str) -> float | None:
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise DataError(f"{where}: the video has fps={excerpt(repr(value))}: frames a second, a number above 0.")
    return float(value)


def _check_sizes(frames: Sequence[ImageRef], where: str) -> None:
    first = frames[0]
    for number, frame in enumerate(frames):
        if (frame.width, frame.height) != (first.width, first.height):
            raise DataError(
                f"{where}: frame {number} of the video ({frame.name}) has {frame.width} x {frame.height} pixels, and "
                f"frame 0 has {first.width} x {first.height}. Processors resize a video as a whole: make its frames "
                "one size."
            )
