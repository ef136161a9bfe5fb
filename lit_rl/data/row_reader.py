"""A row of a source in the one form that is checked and tokenised: mapped, renamed, messages and images in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lit_rl.data.formats import RowFunction, as_read
from lit_rl.data.image_parts import KEYS_OF_IMAGES, RowImages
from lit_rl.errors import DataError, did_you_mean
from lit_rl.videos import Visual


class HowRows(Protocol):
    """Settings of a data module for reading rows of any kind."""

    @property
    def map_row(self) -> RowFunction | None: ...
    @property
    def rename(self) -> Mapping[str, str]: ...
    @property
    def max_image_pixels(self) -> int: ...


class RowReader:
    """A reader of rows one at a time, which remembers their columns, and notes for the user on converted forms.

    Args:
        how: The settings.
        sees: True if the policy is a model over images.
        folder: Folder of the data set's file, which relative paths of images begin at. None: it is no file.
        chat: Plain texts become messages of the user, for a set in which some come with images.
    """

    def __init__(self, how: HowRows, sees: bool, folder: Path | None, chat: bool = False) -> None:
        self._map_row, self._rename = how.map_row, how.rename
        self._images = RowImages(sees, folder, how.max_image_pixels, chat)
        self._texts = {"kept": False, "became a message": False}
        self._columns: dict[str, None] = {}
        self._notes: dict[str, str | None] = {}

    def read(
        self, row: dict[str, Any], where: str, *keys: str, without: Sequence[str] = ()
    ) -> tuple[dict[str, Any], tuple[Visual, ...]]:
        """Return the row, and what it shows.

        Args:
            row: The raw row; it is not changed.
            where: The row, for messages.
            keys: Columns of messages that may show images.
            without: Columns that may show none.

        Raises:
            DataError: `map_row` raised or returned no dict, names clash, messages are of no known form, or images
                cannot be used.
            ConfigError: the row has images, and the policy reads text.
        """
        read = as_read(row, where, rename=self._rename, map_row=self._map_row, keys=keys)
        self._columns.update(dict.fromkeys(read.came))
        shown, images = self._images.read(read.row, where, *keys, without=without)
        notes = list(read.notes)
        if unread := _unread_keys_of_parts(read.row.get(key) for key in keys):
            notes.append(f"parts of messages have keys that are not read: {', '.join(unread)}")
        for key in keys:
            if isinstance(read.row.get(key), str):
                became = isinstance(shown.get(key), list)
                self._texts["became a message" if became else "kept"] = True
                if became and images:
                    notes.append(f"{key} is text beside images: it is read as a message of the user, images first")
        for note in notes:
            self.note(note, where)
        return shown, images

    def note_system(self, prompt: Any, given: str | None, where: str) -> None:
        """Remember where `data.system_prompt` gives way to a system message of the row."""
        if given is None or not isinstance(prompt, list) or not prompt:
            return
        if prompt[0]["role"] in ("system", "developer") and prompt[0]["content"] != given:
            self.note("the row has a system message of its own, and data.system_prompt is not put before it", where)

    @property
    def mixed(self) -> bool:
        """True if some plain texts came with images and became messages, and others did not: all have to."""
        return all(self._texts.values())

    def note(self, what: str, where: str) -> None:
        """Remember a note for the user, with the first row that it holds for."""
        self._notes.setdefault(what, where)

    def check_renamed(self) -> None:
        """Raise DataError where `rename` names a column that no row has."""
        for old in self._rename:
            if old not in self._columns:
                found, hint = ", ".join(self._columns), did_you_mean(old, self._columns)
                raise DataError(f"data.rename: no row has a column {old!r}; columns found: {found}.{hint}")

    def say(self) -> None:
        """Log each note once."""
        from lightning.pytorch.utilities import rank_zero_info

        for note, where in self._notes.items():
            if where is not None:
                rank_zero_info(f"{where}: {note}.")
                self._notes[note] = None


def _unread_keys_of_parts(columns: Iterable[Any]) -> list[str]:
    """Return the keys that hold something, in parts of text and of images."""
    messages = (message for column in columns if isinstance(column, list) for message in column)
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    unread: dict[str, None] = {}
    for part in parts:
        if "video" in str(part.get("type")):  # any other key is refused
            continue
        read = ("type", "text") if part.get("type") == "text" else KEYS_OF_IMAGES
        unread.update(dict.fromkeys(key for key, value in part.items() if value is not None and key not in read))
        if isinstance(held := part.get("image_url"), Mapping):
            unread.update(dict.fromkeys(f"image_url.{key}" for key in held if key != "url"))
    return [*unread]
