"""Training rows that are read as the run needs them: one window of rows after another, each a small data set.

A window is read, filtered, encoded and packed as a whole data set is, and shuffled within itself. Nothing of it depends
on anything but the sources, the settings and the place where it begins, so a run goes on exactly from such a place.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_rl.data.corpus import list_counts
from lit_rl.data.offline.corpus import pad_id, training_set
from lit_rl.data.offline.encode import Encoder
from lit_rl.data.offline.example import Kind
from lit_rl.data.offline.example_set import ExampleSet
from lit_rl.data.offline.options import ExampleOptions
from lit_rl.data.offline.read import add_counts, read_on
from lit_rl.data.offline.reader import Reader
from lit_rl.data.order import RolloutOrder, shared_out
from lit_rl.data.streams import Mark, RowStream
from lit_rl.errors import ConfigError, DataError


@dataclass(frozen=True)
class Place:
    """The position where a window begins, with the counts of all rows before it."""

    marks: tuple[Mark, ...]
    """In each source."""
    met: tuple[Mapping[str, int], ...]
    """Counts of the rows of each source, as `read_examples` counts."""
    number: int = 0
    """Windows before this one."""
    steps: int = 0
    """Optimizer steps in them."""
    left_over: int = 0
    """Rows of theirs that did not fill a last step."""
    packed_rows: int = 0

    @classmethod
    def start(cls, sources: int) -> Place:
        """Return the position of the first row of every source."""
        return cls((Mark(),) * sources, ({},) * sources)

    @classmethod
    def of(cls, saved: Mapping[str, Any], sources: int) -> Place:
        """Restore a position from `plain`. Sources that were added since begin with their first row."""
        first = cls.start(sources)
        marks = (*(Mark(*mark) for mark in saved["marks"]), *first.marks)
        met = (*(dict(counts) for counts in saved["met"]), *first.met)
        return cls(**{**saved, "marks": marks[:sources], "met": met[:sources]})

    def plain(self) -> dict[str, Any]:
        """Return the position as numbers, strings, lists and dicts."""
        return {
            **vars(self),
            "marks": [list(mark) for mark in self.marks],
            "met": [dict(counts) for counts in self.met],
        }

    @property
    def counts(self) -> dict[str, int]:
        """Counts of all sources together, and of the rows left over."""
        return {**functools.reduce(add_counts, self.met, {}), "left_over": self.left_over}


@dataclass(frozen=True)
class Window:
    """The rows between two places."""

    begin: Place
    end: Place
    data: ExampleSet
    sizes: tuple[int, ...]
    """Rows that are left of each source; `data` has the sources one after another."""

    def order(self, batch_size: int, seed: int, shuffle: bool) -> RolloutOrder:
        """Return the order of the window's rows: its epoch is the window's number.

        Raises:
            DataError: its rows do not fill one step.
        """
        if len(self.data) < batch_size:
            raise DataError(
                f"data.batch_size={batch_size}, and {len(self.data)} rows are left of window {self.begin.number + 1} "
                f"of the stream; up to here: {list_counts(self.end.counts)}. Raise data.stream_buffer, loosen a filter "
                "or lower data.batch_size."
            )
        # The weights have shared out the window already; a source may have no row left in some window.
        return RolloutOrder(tuple(size for size in self.sizes if size), batch_size, seed, shuffle)


class Windows:
    """A reader of windows, which holds the latest one.

    Args:
        sources: The sources.
        size: Rows that a window takes of all of them together, those that are left out later included.
        weights: Relative share of each source.
        encoder: Encoder of the policy.
        kind: Kind of the examples.
        options: Options of the examples.
        batch_size: Rows of an optimizer step.

    Raises:
        ConfigError: a source has no row in a window, or an option has no use for this kind.
    """

    def __init__(
        self,
        sources: Sequence[RowStream],
        size: int,
        weights: Sequence[float],
        encoder: Encoder,
        kind: Kind,
        options: ExampleOptions,
        batch_size: int,
    ) -> None:
        options.check_kind(kind)
        self.sources, self.options, self.batch_size = sources, options, batch_size
        self.quotas = shared_out(size, weights)
        if 0 in self.quotas:
            raise ConfigError(
                f"data.sources[{self.quotas.index(0)}]: no row of it is in a window of data.stream_buffer={size} rows: "
                "raise its weight or data.stream_buffer."
            )
        # One reader for all rows of a source: its format must not change between windows.
        self._readers = [Reader(encoder, kind, options) for _ in sources]
        self._pad_id = pad_id(encoder.tokenizer)
        self._held: Window | None = None
        self.start = Place.start(len(sources))
        self.seen = self.start
        """The position after the latest window."""

    @property
    def formats(self) -> tuple[str, ...]:
        """The detected format of each source; empty where no sound row was met yet."""
        return tuple(next(iter(reader.formats), "") for reader in self._readers)

    @property
    def counts(self) -> dict[str, int]:
        """Counts up to the end of the latest window."""
        packed = {} if self.options.packing == "none" else {"packed_rows": self.seen.packed_rows}
        return {**self.seen.counts, **packed, "held_out": 0}

    def take_steps_of(self, batch_size: int) -> None:
        """Set the rows of a step. The window is read again, since positions count steps."""
        self.batch_size, self._held = batch_size, None

    def at(self, place: Place) -> Window:
        """Return the window that begins there. The one before is released first, so one is in memory at a time.

        Raises:
            DataError: a row cannot be used, or the rows met up to here prove the data wrong.
            BackendError: the hub cannot be reached any more.
        """
        if self._held is None or self._held.begin != place:
            self._held = None
            self._held = self._read(place)
            self.seen = self._held.end
        return self._held

    def _read(self, place: Place) -> Window:
        marks, met, examples = [], [], []
        for source, mark, quota, reader, before in zip(
            self.sources, place.marks, self.quotas, self._readers, place.met, strict=True
        ):
            rows, after = source.take(mark, quota)
            kept, counts = read_on(rows, reader, before)
            marks.append(after)
            met.append(dict(counts))
            examples.append(kept)
        data, sizes = training_set(examples, self._readers[0].kind, self._pad_id, self.options)
        steps, left = divmod(len(data), self.batch_size)
        end = Place(
            tuple(marks),
            tuple(met),
            place.number + 1,
            place.steps + steps,
            place.left_over + left,
            place.packed_rows + len(data),
        )
        return Window(place, end, data, sizes)
