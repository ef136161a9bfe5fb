"""Messages with images in one form: parts without payload, and the images in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.data.images import image_of
from lit_rl.errors import ConfigError, DataError
from lit_rl.images import COLUMNS, ImageRef

PART = {"type": "image"}
"""What stands in a message for an image."""

_PAYLOADS = ("image", "url", "image_url")


@dataclass(frozen=True)
class ImageReader:
    """Takes the images out of rows.

    Args:
        folder: Of the data set's file, which relative paths begin at. None: it is no file.
        max_pixels: Width times height of an image, at most.
    """

    folder: Path | None
    max_pixels: int

    def read(self, row: Mapping[str, Any], where: str, *keys: str) -> tuple[dict[str, Any], tuple[ImageRef, ...]]:
        """The row with plain parts in its messages and references in its columns, and the images that these show.

        A part without payload shows the next image of the columns. Where no part is without payload, the images of the
        columns stand before the text of the first message of the user, as TRL has it. Images that stood in the
        messages are in the column ``images`` afterwards, with all others of the row.

        Args:
            row: With messages in the columns `keys`, and images in ``image`` or ``images``.
            where: The row, for messages.
            keys: Columns that hold messages, in the order in which they are shown.

        Raises:
            DataError: an image cannot be used, parts and images are not as many, or images come with a plain text.
        """
        row = {**row, **{key: [_copied(each) for each in row[key]] for key in keys if isinstance(row.get(key), list)}}
        given = self._of_columns(row, where)
        messages = [message for key in keys for message in _messages(row.get(key))]
        if not given and not any(_shows(message) for message in messages):
            return row, ()
        if not messages:
            raise DataError(
                f"{where}: images come with a prompt that is a plain text, which does not say where they stand. Make "
                'it a list of messages: [{"role": "user", "content": ...}].'
            )
        waiting = [part for message in messages for part in _parts(message) if _is_image(part) and not _payload(part)]
        if given and not waiting:
            _insert(messages, len(given), where)
        found = self._in_order(messages, list(given), where)
        if len(found) > len(given):  # some stood in the messages: rewards find all of them in one column
            row.pop("image", None)
            row["images"] = list(found)
        for key in keys:
            if isinstance(row.get(key), list):
                row[key] = [_plain(message) for message in row[key]]
        return row, found

    def _of_columns(self, row: dict[str, Any], where: str) -> tuple[ImageRef, ...]:
        """Those of the columns, in which references take the place of what came."""
        held = {name: row[name] for name in COLUMNS if not _is_nothing(row.get(name))}
        if len(held) > 1:
            raise DataError(f"{where}: the row has both the columns image and images. Keep one of them.")
        for name, value in held.items():
            many = list(value) if name == "images" and isinstance(value, list | tuple) else [value]
            refs = [self._image(each, where) for each in many]
            row[name] = refs if name == "images" else refs[0]
            return tuple(refs)
        return ()

    def _in_order(self, messages: Sequence[dict[str, Any]], given: list[ImageRef], where: str) -> tuple[ImageRef, ...]:
        found, count = [], len(given)
        places = [part for message in messages for part in _parts(message) if _is_image(part)]
        empty = sum(_payload(part) is None for part in places)
        if empty != count:
            raise DataError(
                f"{where}: the messages have {empty} image parts without an image of their own, and the row has "
                f"{count} images. They have to be as many."
            )
        for part in places:
            payload = _payload(part)
            found.append(given.pop(0) if payload is None else self._image(payload, where))
        return tuple(found)

    def _image(self, value: Any, where: str) -> ImageRef:
        return image_of(value, where, folder=self.folder, max_pixels=self.max_pixels)


def images_in(row: Mapping[str, Any], *keys: str) -> str:
    """Where a row has images: its columns, or the messages of these; empty where it has none."""
    held = [f"column {name!r}" for name in COLUMNS if not _is_nothing(row.get(name))]
    shown = [key for key in keys if any(_shows(message) for message in _messages(row.get(key)))]
    return ", ".join([*held, *(f"parts of {key!r}" for key in shown)])


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str | bytes | list | tuple) and not value)


def _copied(message: Any) -> Any:
    return dict(message) if isinstance(message, Mapping) else message


class RowImages:
    """Images of rows for a policy, which sees them or not.

    Args:
        sees: Whether it is a model over images.
        folder: As of `ImageReader`.
        max_pixels: Likewise.
    """

    def __init__(self, sees: bool, folder: Path | None, max_pixels: int) -> None:
        self._reader = ImageReader(folder, max_pixels) if sees else None

    def read(
        self, row: dict[str, Any], where: str, *keys: str, without: Sequence[str] = ()
    ) -> tuple[dict[str, Any], tuple[ImageRef, ...]]:
        """`ImageReader.read` of a row, whose columns `without` may show none.

        Raises:
            ConfigError: the row has images, and the policy reads text.
            DataError: as `ImageReader.read`; or there are images where none may be.
        """
        if self._reader is None:
            if held := images_in(row, *keys, *without):
                raise ConfigError(
                    f"{where}: the row has images ({held}), and the policy is a language model over text. Set model= "
                    "to one that sees, such as smolvlm_256m, or take the images out with data.map_row."
                )
            return row, ()
        if held := images_in({name: row[name] for name in without if name in row}, *without):
            raise DataError(f"{where}: there are images in what is answered ({held}). They belong to the prompt.")
        return self._reader.read(row, where, *keys)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Those of a column; a message that is none is left to who checks them."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _shows(message: Mapping[str, Any]) -> bool:
    return any(_is_image(part) for part in _parts(message))


def _payload(part: Mapping[str, Any]) -> Any:
    """What an image part holds; None where it only marks a place. Tables fill absent keys with None."""
    held = next((part[name] for name in _PAYLOADS if part.get(name) is not None), None)
    if held is None and (part.get("bytes") is not None or part.get("path") is not None):
        return {"bytes": part.get("bytes"), "path": part.get("path")}
    return held.get("url", held) if isinstance(held, Mapping) else held


def _insert(messages: Sequence[dict[str, Any]], count: int, where: str) -> None:
    """Places for so many images before the text of the first message of the user."""
    first = next((message for message in messages if message.get("role") == "user"), None)
    if first is None:
        raise DataError(f"{where}: there are images and no message of the user that could show them.")
    content = first.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    first["content"] = [*(dict(PART) for _ in range(count)), *parts]


def _plain(message: Any) -> Any:
    """The message with bare image parts."""
    if not isinstance(message, dict) or not _shows(message):
        return message
    return {**message, "content": [dict(PART) if _is_image(part) else part for part in _parts(message)]}


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """The words of a message; an image is nothing."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")


def sound_parts(parts: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Parts of text and bare images, neighbouring texts joined.

    Raises:
        DataError: a part is neither.
    """
    found: list[dict[str, Any]] = []
    for part in parts:
        if part == PART:
            found.append(dict(PART))
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            if found and found[-1]["type"] == "text":
                found[-1]["text"] += part["text"]
            else:
                found.append({"type": "text", "text": part["text"]})
        else:
            raise DataError(f"{where} has content parts that are neither text nor images: {excerpt(repr(parts))}.")
    return found
