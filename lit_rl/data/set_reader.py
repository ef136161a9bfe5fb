"""Rows of a source become examples, one at a time: settings, notes for the user, and the counts of every filter.

`SetReader` is the reader of both kinds of rows: of prompts to be answered (`PromptReader`), and of examples that are
learned from as they are (`ExampleReader`).
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from lightning.pytorch.utilities import rank_zero_info

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import DataError, did_you_mean
from lit_rl.core.progress_bar import delayed_progress
from lit_rl.core.visuals import Visual
from lit_rl.data.encode import Encoder
from lit_rl.data.readers import OnBadRow
from lit_rl.data.rendering import check_template_kwargs
from lit_rl.data.row_visuals import KEYS_OF_IMAGES, MAX_IMAGE_PIXELS, ImagePixels, ImageReader, read_images
from lit_rl.data.rows import RowFunction, read_row
from lit_rl.data.sources import Rows
from lit_rl.data.visual_prompts import EqualVideos

Item = TypeVar("Item")
Found = TypeVar("Found")


@checked("data")
@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Settings for reading rows of every kind; the fields are those of the data modules.

    Args:
        rename: New names of columns, old to new.
        map_row: A function from row to row, applied first.
        system_prompt: Opens every prompt that has no system message of its own; a string prompt becomes messages.
        chat_template_kwargs: Further arguments of the chat template.
        on_bad_row: Action for a row that cannot be read: `error` raises, `skip` counts it.
        max_image_pixels: Width times height of an image, at most.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    map_row: RowFunction | None = None
    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    on_bad_row: OnBadRow = "error"
    max_image_pixels: ImagePixels = MAX_IMAGE_PIXELS

    def __post_init__(self) -> None:
        check_template_kwargs(self.chat_template_kwargs)


class SetReader(ABC, Generic[Item, Found]):
    """A reader of rows one at a time, which remembers what only all rows together can prove wrong.

    Args:
        encoder: Renderer and tokeniser of the policy.
        how: The settings.
        folder: Folder of the data set's file, which relative paths of images begin at. None: it is no file.
        chat: Plain texts become messages of the user, for a set in which some come with images.
    """

    label: ClassVar[str]
    """Words of the progress bar."""

    filters: ClassVar[tuple[str, ...]]
    """Names of the counts of rows that are left out as they hold nothing to learn from."""

    def __init__(self, encoder: Encoder, how: RowOptions, folder: Path | None = None, chat: bool = False) -> None:
        self.encoder, self.processor, self._how = encoder, encoder.processor, how
        self.videos = EqualVideos(self.processor)
        self._images = None if self.processor is None else ImageReader(folder, how.max_image_pixels, chat)
        self._texts = {"kept": False, "became a message": False}
        self._columns: dict[str, None] = {}
        self._notes: dict[str, str | None] = {}
        self._met_content = False

    @abstractmethod
    def encode(self, row: dict[str, Any], where: str) -> tuple[str, Found, int]:
        """Return why a row holds nothing, as its counts name it (empty where it holds something); what is read of it;
        and the tokens of its longest text.

        Raises:
            DataError: the row is not sound.
        """

    @abstractmethod
    def keep(self, found: Found, where: str) -> tuple[str, list[Item]]:
        """Return the fate of a row that holds something, as its counts name it, and its examples.

        Raises:
            DataError, ConfigError: the settings refuse the row, and with it the data.
        """

    @abstractmethod
    def check_alike(self) -> None:
        """Raise DataError where rows are of several forms."""

    def read(self, rows: Rows, met: Mapping[str, int] | None = None) -> tuple[list[Item], Counter[str]]:
        """Return the examples of the next rows of the source, and the counts of all rows met.

        The counts are of rows: `rows` (met), `bad` (cannot be read), those of `filters`, `overlong` (left out),
        `truncated` (kept, cut), `forked` (kept, as several examples; absent where there is none), `kept`; and `longest`
        (tokens of the longest text met, before any cut). All but `truncated`, `forked` and `longest` add up to `rows`.

        Args:
            rows: The next rows.
            met: The counts of the rows before.

        Raises:
            DataError: a bad row where `on_bad_row` is `error`; where it is `skip`, the first of them if all rows of a
                source are bad; rows of several forms; `rename` of a column that no row has.
            ConfigError: as `keep`; or the row has images, and the policy reads text.
        """
        counts = Counter(rows=len(rows) + rows.skipped, bad=rows.skipped)
        counts.update(dict.fromkeys((*self.filters, "overlong", "truncated", "kept", "longest"), 0))
        kept: list[Item] = []
        known, first_error = self._met_content, None
        for i in delayed_progress(range(len(rows)), self.label, "row"):
            where = rows.where(i)
            try:
                fate, found, longest = self.encode(rows[i], where)
            except DataError as error:
                if self._how.on_bad_row == "error":
                    raise
                counts["bad"] += 1
                first_error = first_error or error
                continue
            if not fate:
                self._met_content = True
                counts["longest"] = max(counts["longest"], longest)
                fate, examples = self.keep(found, where)
                kept += examples
            counts.update(fate.split())
        if first_error and not known and counts["bad"] - rows.skipped == len(rows):
            raise first_error
        if len(rows) and not self.mixed:
            self._check_whole()
        return kept, add_counts(met or {}, counts)

    def take(
        self, row: dict[str, Any], where: str, *keys: str, without: Sequence[str] = ()
    ) -> tuple[dict[str, Any], tuple[Visual, ...]]:
        """Return a row after `map_row` and `rename`, with its messages in one form, and what it shows.

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
        read = read_row(row, where, rename=self._how.rename, map_row=self._how.map_row, keys=keys)
        self._columns.update(dict.fromkeys(read.raw_columns))
        shown, images = read_images(self._images, read.row, where, *keys, without=without)
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

    def note_system(self, prompt: Any, where: str) -> None:
        """Remember where `data.system_prompt` gives way to a system message of the row."""
        given = self._how.system_prompt
        if given is None or not isinstance(prompt, list) or not prompt:
            return
        if prompt[0]["role"] in ("system", "developer") and prompt[0]["content"] != given:
            self.note("the row has a system message of its own, and data.system_prompt is not put before it", where)

    def note(self, what: str, where: str) -> None:
        """Remember a note for the user, with the first row that it holds for."""
        self._notes.setdefault(what, where)

    @property
    def mixed(self) -> bool:
        """True if some plain texts came with images and became messages, and others did not: all have to."""
        return all(self._texts.values())

    def _check_whole(self) -> None:
        """Raise DataError for rows of several forms, or a name in `rename` that no row has; log what was noted."""
        self.encoder.left_out.warn()
        self.check_alike()
        for old in self._how.rename:
            if old not in self._columns:
                found, hint = ", ".join(self._columns), did_you_mean(old, self._columns)
                raise DataError(f"data.rename: no row has a column {old!r}; columns found: {found}.{hint}")
        for note, where in self._notes.items():
            if where is not None:
                rank_zero_info(f"{where}: {note}.")
                self._notes[note] = None


Reader = TypeVar("Reader", bound=SetReader[Any, Any])


def read_source(rows: Rows, make: Callable[[bool], Reader]) -> tuple[list[Any], Counter[str], Reader]:
    """Return the examples of a whole source, the counts of its rows, and their reader.

    Where some of its plain texts come with images, all rows are read again as messages.

    Args:
        rows: The rows of the source.
        make: Makes a reader; it is given `SetReader.chat`.
    """
    reader = make(False)
    kept, counts = reader.read(rows)
    if reader.mixed:
        reader = make(True)
        kept, counts = reader.read(rows)
    return kept, counts, reader


def list_counts(counts: Mapping[str, int]) -> str:
    """Return counts in one line for a message, without filters that removed no row."""
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count or name in ("rows", "kept"))


def add_counts(one: Mapping[str, int], other: Mapping[str, int]) -> Counter[str]:
    """Return the counts of both together: sums, but for `longest` the maximum."""
    names = {**one, **other}
    return Counter(
        {
            name: (max if name.startswith("longest") else operator.add)(one.get(name, 0), other.get(name, 0))
            for name in names
        }
    )


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
