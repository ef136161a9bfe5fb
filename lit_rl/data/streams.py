"""Training rows that are read while the run needs them, exact to resume.

`RowStream` reads one source from any row on, and again from the first row after the last. `Windows` reads one window
of rows after another: a window is read, filtered, encoded and packed as a whole data set is, and shuffled within
itself. Nothing of a window depends on anything but the sources, the settings and the position where it begins, so a
run resumes exactly from such a position. `StreamLoader` yields the micro-batches of one window after another.

`datasets.IterableDataset` has a `state_dict` of its own, tried on version 5.2.0 with three files of 20,000 rows each:

- Without a shuffle buffer, resumed JSON Lines and parquet went on with exactly the rows of the uninterrupted run, at
  every place tried. `RowStream` uses it for folders of data files and the hub: 20 files of 165 MB resume near their end
  in 0.07 s, where `skip` reads them all (0.7 s; from the hub it would fetch them all again).
- With `shuffle(buffer_size=1000)` they did not: the state is without the buffer, which is filled again. A run that
  resumed at row 25,000 never met 629 rows, met 129 a second time, and ended 500 rows early. So rows are shuffled within
  windows, which can be read again, and a set that is handed over in Python and may have a buffer is resumed by `skip`.
- Files of one kind are read here: `datasets` refuses a file at its first bad line and does not say which line it is,
  reads NaN, gives rows the keys of others, and made 9,500 rows a second of lines of 230 bytes (87,000 here).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from lit_rl.core.errors import ConfigError, DataError, one_of
from lit_rl.core.examples import ExampleBatch
from lit_rl.data.data_module import SourcedDataModule
from lit_rl.data.encode import Encoder
from lit_rl.data.example_reader import ExampleOptions, ExampleReader, example_set
from lit_rl.data.example_set import ExampleSet
from lit_rl.data.kinds import Kind
from lit_rl.data.loaders import ExampleLoader, last_batch, whole_steps
from lit_rl.data.order import RolloutOrder, apportion
from lit_rl.data.readers import ON_BAD_ROW, OnBadRow, RawRow
from lit_rl.data.set_reader import add_counts, list_counts
from lit_rl.data.sources import GivenRows, OpenSource, Rows, open_source, rows_of_data, rows_of_stream
from lit_rl.data.splits import RowSource, SourceColumns

if TYPE_CHECKING:
    from datasets import IterableDataset


@dataclass(frozen=True)
class SourcePosition:
    """A place in a source that is read again and again."""

    passes: int = 0
    """Number of complete passes over the source."""
    rows: int = 0
    """Rows that were taken since, bad ones included."""
    state: dict[str, Any] | None = field(default=None, compare=False)
    """State of the data set there, where `datasets` streams it: numbers, strings and dicts."""


class RowStream:
    """An endless stream of the rows of one source.

    A file of lines is read line by line, parquet by batches, a saved folder through its memory map; a folder of data
    files and the hub as `datasets` streams them. No row is kept.

    Args:
        source: The source to read: a file, folder or hub id, or a data set of `datasets`.
        on_bad_row: Action for a row that cannot be read: `error` raises, `skip` counts it. A bad row is one of those
            taken in any case, so that a place can be found again without parsing what is before it.

    Raises:
        ConfigError, DataError, BackendError: as `open_source`.
    """

    def __init__(self, source: RowSource | GivenRows, on_bad_row: OnBadRow = "error") -> None:
        one_of("data.on_bad_row", on_bad_row, ON_BAD_ROW)
        self.on_bad_row: OnBadRow = on_bad_row
        if isinstance(source, RowSource):
            self._source = open_source(source.path, split=source.split, name=source.name, streaming=True)
            self._own = source.own
        else:
            self._source = OpenSource("data.rows", partial(rows_of_data, source, "data.rows"), False)
            self._own = SourceColumns("data.rows")
        self._mark = SourcePosition()
        self._rows: Iterator[RawRow] | None = None
        self._data: IterableDataset | None = None

    def take(self, mark: SourcePosition, count: int) -> tuple[Rows, SourcePosition]:
        """Return the next `count` rows after a position, and the position after them.

        Going on where the last call ended reads on; from any other place the source is opened again.

        Raises:
            DataError: a row is bad and `on_bad_row` is `error`, the source has no rows, or it cannot be read.
            BackendError: the hub cannot be reached any more.
        """
        raw = self._rows if mark == self._mark and self._rows is not None else self._from(mark)
        self._rows = None  # a generator that has raised is exhausted
        rows = self._source.collect(itertools.islice(raw, count), self.on_bad_row)
        self._rows = raw
        if self._data is not None:
            self._mark = replace(self._mark, state=self._data.state_dict())
        if self._mark.passes > mark.passes:
            rank_zero_info(f"{self._source.name}: read to its end; starting again from the first row.")
        return self._own.of(rows), self._mark

    def _from(self, mark: SourcePosition) -> Iterator[RawRow]:
        """Yield the rows after a position, pass after pass."""
        while True:
            for place, row in self._read(mark):
                self._mark = mark = SourcePosition(mark.passes, mark.rows + 1)
                yield place, row
            if not mark.rows:
                raise DataError(f"data.path={self._source.name}: no rows.")
            mark = SourcePosition(mark.passes + 1)

    def _read(self, mark: SourcePosition) -> Iterator[RawRow]:
        """Yield the rest of a pass."""
        self._data = None
        if self._source.data is None or (mark.rows and not mark.state):
            return self._source.read(mark.rows)
        self._data = self._source.data.skip(0)  # another object, so that the next pass begins with the first row
        if mark.state:  # earlier files are neither read nor fetched again
            self._data.load_state_dict(mark.state)
        return rows_of_stream(self._data, self._source.name, mark.rows)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rows": None}  # an open file cannot go to another process


@dataclass(frozen=True)
class StreamPosition:
    """The position where a window begins, with the counts of all rows before it."""

    marks: tuple[SourcePosition, ...]
    """Positions in each source."""
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
    def start(cls, sources: int) -> StreamPosition:
        """Return the position of the first row of every source."""
        return cls((SourcePosition(),) * sources, ({},) * sources)

    @classmethod
    def of(cls, saved: Mapping[str, Any], sources: int) -> StreamPosition:
        """Restore a position from `plain`. Sources that were added since begin with their first row."""
        first = cls.start(sources)
        marks = (*(SourcePosition(*mark) for mark in saved["marks"]), *first.marks)
        met = (*(dict(counts) for counts in saved["met"]), *first.met)
        return cls(**{**saved, "marks": marks[:sources], "met": met[:sources]})

    def plain(self) -> dict[str, Any]:
        """Return the position as numbers, strings, lists and dicts."""
        return {
            **vars(self),
            "marks": [list(vars(mark).values()) for mark in self.marks],
            "met": [dict(counts) for counts in self.met],
        }

    @property
    def counts(self) -> dict[str, int]:
        """Counts of all sources together, and of the rows left over."""
        return {**functools.reduce(add_counts, self.met, {}), "left_over": self.left_over}


@dataclass(frozen=True)
class Window:
    """The rows between two places."""

    begin: StreamPosition
    end: StreamPosition
    data: ExampleSet
    sizes: tuple[int, ...]
    """Rows that are left of each source; `data` has the sources one after another."""

    def order(self, batch_size: int, seed: int, shuffle: bool) -> RolloutOrder:
        """Return the order of the window's rows: its epoch is the window's number.

        Raises:
            DataError: its rows do not fill one step.
        """
        _refuse_small_window(f"window {self.begin.number + 1}", len(self.data), batch_size, self.end.counts)
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
        self.quotas = apportion(size, weights)
        if 0 in self.quotas:
            raise ConfigError(
                f"data.sources[{self.quotas.index(0)}]: no row of it is in a window of data.stream_buffer={size} rows: "
                "raise its weight or data.stream_buffer."
            )
        # One reader for all rows of a source: its format must not change between windows.
        self._readers = [ExampleReader(encoder, kind, options) for _ in sources]
        self._held: Window | None = None
        self.start = StreamPosition.start(len(sources))
        self.seen = self.start
        """The position after the latest window."""

    @property
    def formats(self) -> tuple[str, ...]:
        """The detected format of each source; empty where no sound row was met yet."""
        return tuple(reader.format for reader in self._readers)

    @property
    def counts(self) -> dict[str, int]:
        """Counts up to the end of the latest window."""
        packed = {} if self.options.packing == "none" else {"packed_rows": self.seen.packed_rows}
        return {**self.seen.counts, **packed, "held_out": 0}

    def set_batch_size(self, batch_size: int) -> None:
        """Set the rows of a step. The window is read again, since positions count steps."""
        self.batch_size, self._held = batch_size, None

    def at(self, place: StreamPosition) -> Window:
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

    def _read(self, place: StreamPosition) -> Window:
        marks, met, examples = [], [], []
        for source, mark, quota, reader, before in zip(
            self.sources, place.marks, self.quotas, self._readers, place.met, strict=True
        ):
            rows, after = source.take(mark, quota)
            kept, counts = reader.read(rows, before)
            marks.append(after)
            met.append(dict(counts))
            examples.append(kept)
        reader = self._readers[0]
        data, sizes = example_set(examples, reader.encoder, reader.kind, self.options)
        steps, left = divmod(len(data), self.batch_size)
        end = StreamPosition(
            tuple(marks),
            tuple(met),
            place.number + 1,
            place.steps + steps,
            place.left_over + left,
            place.packed_rows + len(data),
        )
        return Window(place, end, data, sizes)


class StreamLoader:
    """An iterable over this rank's micro-batches of one window's steps after another's, as `ExampleLoader` is.

    Its rows have no end: an iteration is `length` batches, and the next one continues with the step after.
    `state_dict` is the same on every rank. A state taken at any batch resumes with the batch that would have come next;
    with another number of ranks, with the next whole step.

    Args:
        windows: The rows.
        length: Batches of an iteration on this rank: those of the whole run.
        seed: Seed of the order within windows.
        shuffle: Off, every window has the order of its sources, evenly mixed.
        overfit: Every iteration begins with the first row again.
        limit: `trainer.limit_train_batches`. It only tells which batch is an epoch's last.
        part: Arguments of the `ExampleLoader` of each window.
    """

    def __init__(
        self,
        windows: Windows,
        *,
        length: int,
        seed: int = 0,
        shuffle: bool = True,
        overfit: bool = False,
        limit: int | float = 1.0,
        **part: Any,
    ) -> None:
        self._windows, self._length, self._part = windows, length, part
        self._seed, self._shuffle, self._overfit = seed, shuffle, overfit
        self._last = last_batch(length, limit)
        self._place = windows.start
        self._position = 0  # batches of the window that were taken
        self._taken = 0  # batches of the epoch
        self._continues = False

    def __len__(self) -> int:
        """Return the number of batches of the run on this rank."""
        return self._length

    def __iter__(self) -> Iterator[ExampleBatch]:
        # All of this runs at the first `next`: Lightning may make an iterator that it never uses.
        if self._continues:
            self._continues = False
        else:
            self._taken = 0
            if self._overfit:
                self._place, self._position = self._windows.start, 0
            # An epoch that was cut inside a step: the next one begins with a whole step.
            slots = self._part.get("accumulate", 1)
            self._position = whole_steps(self._position, slots) * slots
        while self._taken < self._length:
            yield from self._rest_of_window()

    def _rest_of_window(self) -> Iterator[ExampleBatch]:
        # A generator of its own: once it ends nothing holds the window, and the next one can be read.
        loader, end = self._loader(), self._windows.at(self._place).end
        loader.position = self._position
        for batch in loader.rest_of_epoch(self._place.number, self._place.steps):
            if self._taken >= self._length:
                return
            self._position, self._taken = loader.position, self._taken + 1
            yield batch
        self._place, self._position = end, 0

    def _loader(self) -> ExampleLoader:
        """Return the loader of the window at hand."""
        window = self._windows.at(self._place)
        order = window.order(self._windows.batch_size, self._seed, self._shuffle)
        return ExampleLoader(window.data, order, **self._part)

    def state_dict(self) -> dict[str, Any]:
        where = {"place": self._place.plain(), "position": self._position, "taken": self._taken}
        return {**where, **self._loader().identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved loader was.

        Raises:
            DataError: the state belongs to other rows or another order, and `allow_changed` is off; or to a run that
                read all rows at once.
        """
        if "place" not in state:
            raise DataError(
                "The checkpoint's run read all of its rows at once, and this run streams them (data.stream_buffer). "
                "Remove data.stream_buffer."
            )
        self._place = StreamPosition.of(state["place"], len(self._windows.sources))
        self._position, self._taken = self._loader().batches_of(state, "position", "taken")
        self._continues = self._taken < self._last


def _refuse_small_window(window: str, rows: int, batch_size: int, counts: Mapping[str, int]) -> None:
    if rows < batch_size:
        raise DataError(
            f"data.batch_size={batch_size}, and {rows} rows are left of {window} of the stream; up to here: "
            f"{list_counts(counts)}. Raise data.stream_buffer, loosen a filter or lower data.batch_size."
        )


def check_stream_settings(data: SourcedDataModule, size: int, *, batch_size: int, max_length: int | None) -> None:
    """Check the settings of the data against `data.stream_buffer`.

    Args:
        data: The data module.
        size: `data.stream_buffer`, the rows of a window.
        batch_size: Rows of one optimizer step.
        max_length: Longest text, in tokens; None is no limit.

    Raises:
        ConfigError: a setting of the data does not fit `stream_buffer`.
    """
    if size < batch_size:
        raise ConfigError(
            f"data.stream_buffer={size} is below data.batch_size={batch_size}, the rows of one step: raise it; "
            "some thousands are usual."
        )
    if not data.streamable:
        key = "data.rows" if data.rows is not None else "data.task"
        raise ConfigError(
            f"data.stream_buffer={size} streams files, the hub and data sets of `datasets`, and {key} is in memory "
            "already. Remove data.stream_buffer, or write the rows to a .jsonl file and set data.path."
        )
    if max_length is None:
        raise ConfigError(
            f"data.max_length=null with data.stream_buffer={size}: the longest row is not known before it is read, so "
            "whether it fits into the model is not either. Set data.max_length."
        )
    if data.val_fraction > 0 and not data.val_sources and data.val is None:
        raise ConfigError(
            f"data.val_fraction={data.val_fraction} with data.stream_buffer={size}: prompts cannot be held out of rows "
            "that are never there all at once. Set data.val_fraction=0, or name a validation set (data.val_path, or "
            "data.val_split; in Python val)."
        )


def check_stream_trainer(trainer: L.Trainer) -> None:
    """Check that the Trainer says how long the run is.

    Raises:
        ConfigError: nothing says how long the run is, or loaders are rebuilt within it.
    """
    if trainer.max_steps in (None, -1):
        raise ConfigError(
            f"trainer.max_steps={trainer.max_steps} with data.stream_buffer: a stream has no end, so there is no epoch "
            f"that trainer.max_epochs={trainer.max_epochs} could count. Set trainer.max_steps, the optimizer steps of "
            "the run."
        )
    if every := trainer.reload_dataloaders_every_n_epochs:  # pyright: ignore
        raise ConfigError(
            f"trainer.reload_dataloaders_every_n_epochs={every} with data.stream_buffer: a new loader would begin with "
            "the first row again. Set it to 0."
        )


def check_first_window(sizes: tuple[int, ...], batch_size: int, counts: Mapping[str, int]) -> None:
    """Refuse a first window that cannot be learned from.

    Args:
        sizes: Rows of each source that are left.
        batch_size: Rows of a step.
        counts: Counts of every filter, for the message.

    Raises:
        DataError: its rows do not fill one step, or a source has none left.
    """
    _refuse_small_window("the first window", sum(sizes), batch_size, counts)
    if 0 in sizes:
        raise DataError(
            f"data.sources[{sizes.index(0)}]: the filters left no row of it in the first window of the stream; raise "
            "data.stream_buffer."
        )
