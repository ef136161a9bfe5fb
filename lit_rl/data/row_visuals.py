"""Images and videos of rows: values become references, and messages hold parts without payload.

Only headers are read here, never pixels, and nothing is fetched from the network. A video is a list of frames, each
of which is read as an image.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lit_rl.core.errors import ConfigError, DataError, did_you_mean, excerpt
from lit_rl.core.visuals import (
    IMAGE_COLUMNS,
    VIDEO_COLUMNS,
    ImageRef,
    VideoRef,
    Visual,
    as_png,
    as_rgb,
    digest_of,
    is_pillow,
    pillow,
)
from lit_rl.ops.ranges import Range

MAX_IMAGE_PIXELS = 40_000_000
"""Width times height of an image that a data set may hold, by default: 120 MB as RGB."""

MOST_IMAGE_PIXELS = 178_956_970
"""The largest image that Pillow opens, in pixels."""

ImagePixels = Annotated[int, Range(1, MOST_IMAGE_PIXELS, whole=True)]
"""Width times height of an image that Pillow opens."""

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
        return _image_from_text(str(value), where, folder, max_pixels)
    if isinstance(value, bytes | bytearray | memoryview):
        return _image_from_bytes(bytes(value), "bytes", where, max_pixels)
    if isinstance(value, Mapping) and value.keys() <= {"bytes", "path"}:
        data, path = value.get("bytes"), value.get("path")
        if data is not None:
            return _image_from_bytes(bytes(data), str(path or "bytes"), where, max_pixels)
        if isinstance(path, str):
            return _image_from_text(path, where, folder, max_pixels)
        raise DataError(f"{where}: the image has neither bytes nor a path.")
    if is_pillow(value):
        return _image_from_pillow(value, where, max_pixels)
    raise DataError(f"{where}: the image is {excerpt(repr(value))} ({type(value).__name__}); allowed are {ALLOWED}.")


def _image_from_text(text: str, where: str, folder: Path | None, max_pixels: int) -> ImageRef:
    if text.startswith("data:"):
        return _image_from_bytes(_decode_uri(text, where), "a data: URI", where, max_pixels)
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


def _decode_uri(uri: str, where: str) -> bytes:
    head, comma, payload = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise DataError(f"{where}: the image {excerpt(uri, 40)} is a data: URI that is not base64.")
    try:
        return base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise DataError(f"{where}: the image {excerpt(uri, 40)} is no sound base64: {error}.") from error


def _image_from_pillow(image: Any, where: str, max_pixels: int) -> ImageRef:
    """Encode a PIL image as PNG of the pixels that will be read, so that every mode can be stored."""
    _check_size(image.width, image.height, "a PIL image", where, max_pixels)
    if getattr(image, "is_animated", False):
        raise _animated("a PIL image", where)
    try:
        encoded = as_png(as_rgb(image))
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: the image, a PIL image, cannot be used: {error}.") from error
    return _image_from_bytes(encoded, "a PIL image", where, max_pixels)


def _image_from_bytes(data: bytes, name: str, where: str, max_pixels: int) -> ImageRef:
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
        value: A list of frames, each anything that `lit_rl.data.row_visuals.image_of` reads; a mapping of ``frames``
            and ``fps``, frames a second; or a reference.
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
    first = frames[0]
    for number, frame in enumerate(frames):
        if (frame.width, frame.height) != (first.width, first.height):
            raise DataError(
                f"{where}: frame {number} of the video ({frame.name}) has {frame.width} x {frame.height} pixels, and "
                f"frame 0 has {first.width} x {first.height}. Processors resize a video as a whole: make its frames "
                "one size."
            )
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


PART = {"type": "image"}
"""The part of a message that stands for an image."""

VIDEO_PART = {"type": "video"}
"""The part of a message that stands for a video."""

_PAYLOADS = {"image": ("image", "url", "image_url"), "video": ("video", "url", "video_url")}
"""Keys of a part that hold what it shows."""

KEYS_OF_IMAGES = ("type", "bytes", "path", *_PAYLOADS["image"])
"""Keys that are read of a part that shows an image."""

_KEYS_OF_VIDEOS = ("type", "fps", "bytes", "path", *_PAYLOADS["video"])
"""Keys that may hold something in a part that shows a video."""


@dataclass(frozen=True)
class _Kind:
    """A kind of visual: image or video."""

    name: str
    columns: tuple[str, str]
    """Columns of a row: for one, and for a list."""
    types: tuple[str, str]
    """Types of message parts."""
    reference: type[ImageRef] | type[VideoRef]

    @property
    def part(self) -> dict[str, Any]:
        return {"type": self.name}

    def has(self, part: Any) -> bool:
        return isinstance(part, Mapping) and part.get("type") in self.types

    def is_nothing(self, value: Any, column: str) -> bool:
        """Tell whether a column shows nothing. A video without a frame counts as a video, and is an error."""
        empty = str | bytes if column == "video" else str | bytes | list | tuple
        return value is None or (isinstance(value, empty) and not value)


_IMAGE = _Kind("image", IMAGE_COLUMNS, ("image", "image_url"), ImageRef)
_VIDEO = _Kind("video", VIDEO_COLUMNS, ("video", "video_url"), VideoRef)
_KINDS = (_IMAGE, _VIDEO)


@dataclass(frozen=True)
class ImageReader:
    """A reader that takes the images and videos out of rows.

    Args:
        folder: Folder of the data set's file, which relative paths begin at. None: it is no file.
        max_pixels: Width times height of an image or a frame, at most.
        chat: A plain text that shows nothing becomes a message too, as other rows of its set are.
    """

    folder: Path | None
    max_pixels: int
    chat: bool = False

    def read(self, row: Mapping[str, Any], where: str, *keys: str) -> tuple[dict[str, Any], tuple[Visual, ...]]:
        """Return the row with bare parts in its messages and references in its columns, and the visuals that the
        messages show.

        A part without payload shows the next image (or video) of the columns. Where no such part is without payload,
        what the columns have stands before the text of the first message of the user, images first, as TRL has it for
        these. Images that stood in the messages are in the column ``images`` afterwards, with all others of the row,
        and videos in ``videos``. A plain text that comes with images becomes a message of the user, images first.

        Args:
            row: A row with messages in the columns `keys`, images in ``image`` or ``images``, videos in ``video`` or
                ``videos``.
            where: The row, for messages.
            keys: Columns that hold messages, in the order in which they are shown.

        Raises:
            DataError: an image or a video cannot be used, parts and what they show are not as many, or images come
                without a prompt.
        """
        row = {**row}
        for key in keys:
            if isinstance(row.get(key), list):
                row[key] = [dict(each) if isinstance(each, Mapping) else each for each in row[key]]
        in_columns = {kind.name: self._take_columns(kind, row, where) for kind in _KINDS}
        if self.chat or any(in_columns.values()):
            texts = [key for key in keys if isinstance(row.get(key), str)]
            row.update({key: [{"role": "user", "content": row[key]}] for key in texts})
        messages = [message for key in keys for message in _messages(row.get(key))]
        if not any(in_columns.values()) and not any(_shows(message) for message in messages):
            return row, ()
        if not messages:
            what = " and ".join(f"{name}s" for name, refs in in_columns.items() if refs)
            raise DataError(
                f"{where}: {what} come without a prompt that could show them. Give one, a text or a list of messages, "
                f"in the column {' or '.join(keys)}."
            )
        for kind in reversed(_KINDS):  # the last inserted stand first
            places = [part for message in messages for part in _parts(message) if kind.has(part)]
            if in_columns[kind.name] and all(map(_payload, places)):
                _insert_parts(kind, messages, len(in_columns[kind.name]), where)
        found = self._in_order(messages, {name: list(refs) for name, refs in in_columns.items()}, where)
        for kind in _KINDS:
            refs = [ref for ref in found if isinstance(ref, kind.reference)]
            # Where some stood in the messages, rewards find all of them in one column.
            if len(refs) > len(in_columns[kind.name]):
                one, many = kind.columns
                row.pop(one, None)
                row[many] = refs
        for key in keys:
            if isinstance(row.get(key), list):
                row[key] = [
                    {
                        **message,
                        "content": [shown.part if (shown := _kind_of(part)) else part for part in _parts(message)],
                    }
                    if isinstance(message, dict) and _shows(message)
                    else message
                    for message in row[key]
                ]
        return row, found

    def _take_columns(self, kind: _Kind, row: dict[str, Any], where: str) -> tuple[Visual, ...]:
        """Return the visuals of the columns, and put references in the row in the place of the values."""
        one, many = kind.columns
        held = {name: row[name] for name in kind.columns if not kind.is_nothing(row.get(name), name)}
        if len(held) > 1:
            raise DataError(f"{where}: the row has both the columns {one} and {many}. Keep one of them.")
        for name, value in held.items():
            values = list(value) if name == many and isinstance(value, list | tuple) else [value]
            refs = [self._reference(kind, each, where) for each in values]
            row[name] = refs if name == many else refs[0]
            return tuple(refs)
        return ()

    def _in_order(
        self, messages: Sequence[dict[str, Any]], in_columns: dict[str, list[Visual]], where: str
    ) -> tuple[Visual, ...]:
        places = [(kind, part) for message in messages for part in _parts(message) for kind in _KINDS if kind.has(part)]
        for kind in _KINDS:
            empty = sum(each is kind and _payload(part) is None for each, part in places)
            if empty != len(in_columns[kind.name]):
                what = f"{kind.name} parts without {'an image' if kind is _IMAGE else 'frames'} of their own"
                raise DataError(
                    f"{where}: the messages have {empty} {what}, and the row has {len(in_columns[kind.name])} "
                    f"{kind.name}s. They have to be as many."
                )
        found = []
        for kind, part in places:
            if kind is _VIDEO:
                _check_video_part(part, where)
            payload = _payload(part)
            found.append(in_columns[kind.name].pop(0) if payload is None else self._reference(kind, payload, where))
        return tuple(found)

    def _reference(self, kind: _Kind, value: Any, where: str) -> Visual:
        read = image_of if kind is _IMAGE else video_of
        return read(value, where, folder=self.folder, max_pixels=self.max_pixels)


def images_in(row: Mapping[str, Any], *keys: str) -> str:
    """Return a description of where a row has images or videos (columns or messages); empty where it has none."""
    held = [f"column {name!r}" for name in IMAGE_COLUMNS if not _IMAGE.is_nothing(row.get(name), name)]
    held += [f"column {name!r}" for name in VIDEO_COLUMNS if lists_frames(row.get(name))]
    shown = [key for key in keys if any(_shows(message) for message in _messages(row.get(key)))]
    return ", ".join([*held, *(f"parts of {key!r}" for key in shown)])


def read_images(
    reader: ImageReader | None, row: dict[str, Any], where: str, *keys: str, without: Sequence[str] = ()
) -> tuple[dict[str, Any], tuple[Visual, ...]]:
    """Read a row by an `ImageReader`, and refuse images in the columns `without`.

    Args:
        reader: The reader; None for a policy over text, whose rows may have no images.
        row: The row.
        where: The row, for messages.
        keys: Columns of messages that may show images.
        without: Columns that may show none.

    Raises:
        ConfigError: the row has images or videos, and the policy reads text.
        DataError: as `ImageReader.read`; or there are images where none may be.
    """
    if reader is None:
        if held := images_in(row, *keys, *without):
            raise ConfigError(
                f"{where}: the row has images or videos ({held}), and the policy is a language model over text. "
                "Set model= to one that sees, such as smolvlm_256m, or take them out with data.map_row."
            )
        return row, ()
    if held := images_in({name: row[name] for name in without if name in row}, *without):
        raise DataError(f"{where}: there are images in what is answered ({held}). They belong to the prompt.")
    return reader.read(row, where, *keys)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a column, without entries that are no messages: those are refused elsewhere."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _kind_of(part: Any) -> _Kind | None:
    return next((kind for kind in _KINDS if kind.has(part)), None)


def _shows(message: Mapping[str, Any]) -> bool:
    return any(_kind_of(part) for part in _parts(message))


def _payload(part: Mapping[str, Any]) -> Any:
    """Return the payload of a part; None for a bare placeholder. Tables fill absent keys with None."""
    kind = _VIDEO if _VIDEO.has(part) else _IMAGE
    held = next((part[name] for name in _PAYLOADS[kind.name] if part.get(name) is not None), None)
    if held is None and (part.get("bytes") is not None or part.get("path") is not None):
        return {"bytes": part.get("bytes"), "path": part.get("path")}
    if kind is _VIDEO and part.get("fps") is not None and not (isinstance(held, Mapping) or held is None):
        return {"frames": held, "fps": part["fps"]}
    return held.get("url", held) if isinstance(held, Mapping) else held


def _check_video_part(part: Mapping[str, Any], where: str) -> None:
    """Refuse keys of a video part that would be ignored: processors have many settings, and frames are shown as they
    are.

    Raises:
        DataError: it has another key, or a rate beside frames that have one already or are not its own.
    """
    held = [key for key, value in part.items() if value is not None]
    if unknown := [key for key in held if key not in _KEYS_OF_VIDEOS]:
        raise DataError(
            f"{where}: a video part has the keys {', '.join(map(str, unknown))}; allowed are type, video and fps. "
            "Frames are shown as they are listed."
        )
    if "fps" in held and not isinstance(part.get("video"), list | tuple):
        raise DataError(
            f'{where}: a video part sets fps and lists no frames. Set it next to the frames: {{"frames": [...], "fps": '
            "2.0}."
        )


def _insert_parts(kind: _Kind, messages: Sequence[dict[str, Any]], count: int, where: str) -> None:
    """Insert `count` placeholders before the text of the user's first message."""
    first = next((message for message in messages if message.get("role") == "user"), None)
    if first is None:
        raise DataError(f"{where}: there are {kind.name}s and no message of the user that could show them.")
    content = first.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    first["content"] = [*(kind.part for _ in range(count)), *parts]


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a message's content, without images and videos."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")


def check_parts(parts: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Return checked parts: texts, bare images and bare videos, with neighbouring texts joined.

    Raises:
        DataError: a part is neither.
    """
    found: list[dict[str, Any]] = []
    for part in parts:
        if part in (PART, VIDEO_PART):
            found.append(dict(part))
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            if found and found[-1]["type"] == "text":
                found[-1]["text"] += part["text"]
            else:
                found.append({"type": "text", "text": part["text"]})
        else:
            raise DataError(
                f"{where} has content parts that are neither text nor images nor videos: {excerpt(repr(parts))}."
            )
    return found
