"""Training rows that are read while the run needs them, exact to resume.

`RowStream` reads one source from any row on, and again from the first row after the last. `Windows` reads one window
of rows after another: a window is read, filtered, encoded and packed as a whole data set is, and shuffled within
itself. Nothing of a window depends on anything but the sources, the settings and the position where it begins, so a
run resumes exactly from such a position. `StreamLoader` yields the micro-batches of one window after another.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from lit_rl.core.errors import BackendError, ConfigError, DataError, excerpt, one_of
from lit_rl.core.examples import ExampleBatch
from lit_rl.data.corpus import (
    add_counts,
    list_counts,
    pad_id,
    read_more_examples,
    training_set,
)
from lit_rl.data.data_module import SourcedDataModule
from lit_rl.data.encode import Encoder
from lit_rl.data.example_reader import ExampleOptions, ExampleReader
from lit_rl.data.example_set import ExampleSet
from lit_rl.data.kinds import Kind
from lit_rl.data.loaders import ExampleLoader, accept_changed_data, whole_steps, world_size_changed
from lit_rl.data.order import RolloutOrder, apportion
from lit_rl.data.readers import (
    BATCH,
    ON_BAD_ROW,
    OnBadRow,
    RawRow,
    row_of_table,
    rows_of_cells,
    rows_of_lines,
    rows_of_parquet,
)
from lit_rl.data.sources import GivenRows, Rows, hub_name, is_one_value, local_path, open_hub, open_saved, suffix_of
from lit_rl.data.splits import RowSource, SourceColumns

ReadFromRow = Callable[[int], Iterator[RawRow]]
"""Reads the rows of a source after as many that are skipped."""


class SourcePosition(NamedTuple):
    """A place in a source that is read again and again."""

    passes: int = 0
    """Number of complete passes over the source."""
    rows: int = 0
    """Rows that were taken since, bad ones included."""


class RowStream:
    """An endless stream of the rows of one source.

    A file of lines is read line by line, parquet by batches, a saved folder through its memory map; a folder of data
    files and the hub as `datasets` streams them. No row is kept.

    Args:
        source: The source to read: a file, folder or hub id, or a data set of `datasets`.
        on_bad_row: Action for a row that cannot be read: `error` raises, `skip` counts it. A bad row is one of those
            taken in any case, so that a place can be found again without parsing what is before it.

    Raises:
        ConfigError: the source is in memory whole (a .json array), or its split is a slice.
        DataError: nothing is there, or it cannot be read.
        BackendError: the hub cannot be reached, or does not give the data set.
    """

    def __init__(self, source: RowSource | GivenRows, on_bad_row: OnBadRow = "error") -> None:
        one_of("data.on_bad_row", on_bad_row, ON_BAD_ROW)
        self.on_bad_row = on_bad_row
        self.name, self._read, self._has_lines = _open_source(source)
        self._own = source.own if isinstance(source, RowSource) else SourceColumns(self.name)
        self._mark = SourcePosition()
        self._rows: Iterator[RawRow] | None = None

    def take(self, mark: SourcePosition, count: int) -> tuple[Rows, SourcePosition]:
        """Return the next `count` rows after a position, and the position after them.

        Going on where the last call ended reads on; from any other place the source is opened again.

        Raises:
            DataError: a row is bad and `on_bad_row` is `error`, the source has no rows, or it cannot be read.
            BackendError: the hub cannot be reached any more.
        """
        raw = self._rows if mark == self._mark and self._rows is not None else self._read(mark.rows)
        self._rows = None  # a generator that has raised is exhausted
        rows, places, skipped, begun = [], [], 0, mark
        for _ in range(count):
            while (item := next(raw, None)) is None:
                if not mark.rows:
                    raise DataError(f"data.path={self.name}: no rows.")
                if mark.passes == begun.passes:
                    rank_zero_info(f"{self.name}: read to its end; starting again from the first row.")
                mark, raw = SourcePosition(mark.passes + 1), self._read(0)
            place, row = item
            mark = SourcePosition(mark.passes, mark.rows + 1)
            if not isinstance(row, DataError):
                rows.append(row)
                places.append(place)
            elif self.on_bad_row == "error":
                raise row
            else:
                skipped += 1
        self._mark, self._rows = mark, raw
        where = {"lines": places} if self._has_lines else {"indices": places}
        return self._own.of(Rows(self.name, rows, skipped=skipped, **where)), mark

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rows": None}  # an open file cannot go to another process


def _open_source(source: Any) -> tuple[str, ReadFromRow, bool]:
    """Return the name of a source for messages, its reader, and whether its rows have line numbers."""
    if not isinstance(source, RowSource):
        return "data.rows", partial(_rows_of_data, source, "data.rows"), False
    path, split, name = source.path, source.split, source.name
    local = local_path(path)
    if local is not None and local.is_file():
        suffix = suffix_of(local, split, name)
        if suffix == ".parquet":
            return str(local), partial(rows_of_parquet, local), False
        if suffix in (".csv", ".tsv"):
            return str(local), partial(rows_of_cells, local, "," if suffix == ".csv" else "\t"), True
        if suffix == ".json" and is_one_value(local):
            raise ConfigError(
                f"data.stream_buffer with data.path={local}: a .json file of one value is read whole. Write one object "
                "a line (.jsonl), or leave data.stream_buffer out."
            )
        return str(local), partial(rows_of_lines, local), True
    if split is not None and "[" in split:
        raise ConfigError(
            f"data.split={split!r} with data.stream_buffer: a slice needs all rows. Name a whole split, or leave "
            "data.stream_buffer out."
        )
    if local is not None:
        data = open_saved(local, split=split, name=name, streaming=True)
        return str(local), partial(_rows_of_data, data, str(local)), False
    data, title = open_hub(path, split=split, name=name, streaming=True), hub_name(path, split)
    return title, partial(_rows_of_data, data, title), False


def _rows_of_data(data: Any, name: str, skip: int) -> Iterator[RawRow]:
    """Yield rows of a data set of `datasets`, mapped into memory or streamed."""
    import datasets

    if isinstance(data, datasets.Dataset):
        table = data.with_format("arrow")
        for start in range(skip, len(data), BATCH):
            rows: Any = table[start : start + BATCH]
            yield from enumerate(map(row_of_table, rows.to_pylist()), start)
        return
    streamed = iter(data.skip(skip))
    for index in itertools.count(skip):
        try:
            row = next(streamed, None)
        except OSError as error:
            raise BackendError(f"{name}[{index}]: the source stopped: {excerpt(str(error), 200)}") from error
        except Exception as error:  # `datasets` raises errors of many classes for bad data
            raise DataError(f"{name}[{index}]: cannot be read: {excerpt(str(error), 200)}") from error
        if row is None:
            return
        yield index, row_of_table(row)


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
        self.quotas = apportion(size, weights)
        if 0 in self.quotas:
            raise ConfigError(
                f"data.sources[{self.quotas.index(0)}]: no row of it is in a window of data.stream_buffer={size} rows: "
                "raise its weight or data.stream_buffer."
            )
        # One reader for all rows of a source: its format must not change between windows.
        self._readers = [ExampleReader(encoder, kind, options) for _ in sources]
        self._pad_id = pad_id(encoder.tokenizer)
        self._held: Window | None = None
        self.start = StreamPosition.start(len(sources))
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
            kept, counts = read_more_examples(rows, reader, before)
            marks.append(after)
            met.append(dict(counts))
            examples.append(kept)
        data, sizes = training_set(examples, self._readers[0].kind, self._pad_id, self.options)
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
        accumulate: Micro-batches of a step on each rank.
        limit: `trainer.limit_train_batches`. It only tells which batch is an epoch's last.
        allow_changed: Load a state also where the rows, their order or the slots are no longer those of the state.
        part: Arguments by which `ExampleLoader` shares out a step: `rank`, `world_size` and `group_by_length`.
    """

    def __init__(
        self,
        windows: Windows,
        *,
        length: int,
        seed: int = 0,
        shuffle: bool = True,
        overfit: bool = False,
        accumulate: int = 1,
        limit: int | float = 1.0,
        allow_changed: bool = False,
        **part: Any,
    ) -> None:
        self._windows, self._length = windows, length
        self._seed, self._shuffle, self._overfit = seed, shuffle, overfit
        self._slots, self._part = accumulate, part
        self._last = int(length * limit) if isinstance(limit, float) else min(limit, length)
        self._allow_changed = allow_changed
        self._place = windows.start
        self._position = 0  # batches of the window that were taken
        self._taken = 0  # batches of the epoch
        self._continues = False
        self.row_settings: Mapping[str, Any] = {}
        """See `SlottedLoader.row_settings`."""

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
            self._position = -(-self._position // self._slots) * self._slots
        while self._taken < self._length:
            yield from self._rest_of_window()

    def _rest_of_window(self) -> Iterator[ExampleBatch]:
        # A generator of its own: once it ends nothing holds the window, and the next one can be read.
        loader, end = self._loader(), self._windows.at(self._place).end
        rows, size = loader.order.epoch(self._place.number), loader.order.prompts_per_rollout
        step, first_slot = divmod(self._position, self._slots)
        for index in range(step, loader.order.rollouts_per_epoch):
            whole = rows[index * size : (index + 1) * size]
            for batch in loader.batches(whole, self._place.steps + index)[first_slot:]:
                if self._taken >= self._length:
                    return
                self._position += 1
                self._taken += 1
                yield batch
            first_slot = 0
        self._place, self._position = end, 0

    def _loader(self) -> ExampleLoader:
        """Return the loader of the window at hand."""
        window = self._windows.at(self._place)
        order = window.order(self._windows.batch_size, self._seed, self._shuffle)
        loader = ExampleLoader(window.data, order, accumulate=self._slots, **self._part)
        loader.row_settings = self.row_settings
        return loader

    def state_dict(self) -> dict[str, Any]:
        return {
            "place": self._place.plain(),
            "position": self._position,
            "taken": self._taken,
            "fingerprint": self.fingerprint,
            "made_by": self._loader().made_by(self._slots),
            "slots": self._slots,
            "world_size": self._part.get("world_size", 1),
        }

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
        other = world_size_changed(state, self._part.get("world_size", 1))
        slots = state["slots"] if other else self._slots
        loader = self._loader()
        if state["fingerprint"] != loader.fingerprint_of(slots):
            accept_changed_data(loader, state, slots, allowed=self._allow_changed)
        taken = (state[name] for name in ("position", "taken"))
        self._position, self._taken = (whole_steps(n, slots) * self._slots if other else n for n in taken)
        self._continues = self._taken < self._last

    @property
    def fingerprint(self) -> str:
        """Equal where the same position in this window means the same batch."""
        return self._loader().fingerprint


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
    if sum(sizes) < batch_size:
        raise DataError(
            f"data.batch_size={batch_size}, and {sum(sizes)} rows are left of the first window of the stream: "
            f"{list_counts(counts)}. Raise data.stream_buffer, loosen a filter or lower data.batch_size."
        )
    if 0 in sizes:
        raise DataError(
            f"data.sources[{sizes.index(0)}]: the filters left no row of it in the first window of the stream; raise "
            "data.stream_buffer."
        )
