"""Iterables of batches of prompts and of examples: sized, stateful and exact to resume.

They are no `DataLoader`, so that no flag of the Trainer rebuilds them. `SlottedLoader` is the base: each step of an
order is cut into `slots` batches on each rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from lightning.pytorch.utilities import rank_zero_info

from lit_rl.core.errors import ConfigError, DataError, in_range
from lit_rl.core.examples import ExampleBatch
from lit_rl.core.fingerprints import fingerprint_of, text_digest
from lit_rl.core.rollout import PromptBatch
from lit_rl.data.curriculum import RowDraws
from lit_rl.data.example_set import ExampleSet
from lit_rl.data.order import RolloutOrder, count_occurrences
from lit_rl.data.prompt_set import PromptSet

Batch = TypeVar("Batch")


class SlottedLoader(ABC, Generic[Batch]):
    """An iterable over this rank's part of every step of an order, in `slots` batches.

    Every rank takes an equal part of a step's rows, so the steps do not depend on how many there are. An iteration is
    one epoch; the next one goes on with the next epoch. `state_dict` is the same on every rank. A state taken at any
    batch resumes with the batch that would have come next; one taken at an epoch's last batch, with the next epoch,
    because Lightning then starts a new epoch. With another number of ranks it resumes with the next whole step: a step
    may then have another number of batches.

    Args:
        fingerprint: Fingerprint of the rows.
        order: The order that assigns rows to each step.
        slots: Batches of a step on each rank.
        rank: Index of this rank.
        world_size: Number of ranks.
        sharing: Number of neighbouring ranks that take the same rows; it divides the number of ranks.
        epoch: The epoch to begin with, where no state is loaded.
        limit: `trainer.limit_train_batches`: a number of batches, or a share of them if a float. It only tells which
            batch is an epoch's last.
        allow_changed: Load a state also where the data, its order or the slots are no longer those of the state.
        row_settings: Settings that made the rows, by name, as plain values: they name the cause where a checkpoint's
            rows were others.
    """

    size_key = "data.prompts_per_rollout"
    """Name of the setting that says how many rows a step has."""

    cut_keys = "trainer.accumulate_grad_batches"
    """Names of the settings that say which row of a step is in which of its batches."""

    def __init__(
        self,
        fingerprint: str,
        order: RolloutOrder,
        *,
        slots: int = 1,
        rank: int = 0,
        world_size: int = 1,
        sharing: int = 1,
        epoch: int = 0,
        limit: int | float = 1.0,
        allow_changed: bool = False,
        row_settings: Mapping[str, Any] | None = None,
    ) -> None:
        parts = world_size // sharing
        if order.prompts_per_rollout % parts:
            below = order.prompts_per_rollout // parts * parts
            above = below + parts
            near = f"the nearest that do are {below} and {above}" if below else f"the nearest that does is {above}"
            raise ConfigError(
                f"{self.size_key}={order.prompts_per_rollout} does not divide over {world_size} ranks: {near}."
            )
        self.order, self.slots, self.rank, self.world_size, self.sharing = order, slots, rank, world_size, sharing
        self.allow_changed, self.row_settings = allow_changed, row_settings or {}
        self.position = 0
        """Batches of the epoch that were taken."""
        self._data = fingerprint
        self._last = last_batch(len(self), limit)
        self._epoch = epoch
        self._continues = False

    @abstractmethod
    def batches(self, rows: list[int], number: int) -> Sequence[Batch]:
        """Return this rank's batches of one step, one for each slot.

        Args:
            rows: Rows of the whole step, all ranks together.
            number: Number of the step, over all epochs.
        """

    def rows_of_steps(self, epoch: int, steps: range) -> Iterator[list[int]]:
        """Yield the rows of each of these steps of an epoch, all ranks together."""
        rows, size = self.order.epoch(epoch), self.order.prompts_per_rollout
        yield from (rows[index * size : (index + 1) * size] for index in steps)

    def describe_dealing(self, slots: int) -> str:
        """Describe how the rows of a step are dealt out to slots, where that is not in their order."""
        return ""

    def describe_draws(self) -> str:
        """Describe what draws the rows of a step, where that is not the order alone."""
        return ""

    @property
    def share(self) -> int:
        """Rows of a step on each rank."""
        return self.order.prompts_per_rollout * self.sharing // self.world_size

    @property
    def own_rows(self) -> slice:
        """The part of a step's rows that is this rank's."""
        part = self.rank // self.sharing
        return slice(part * self.share, (part + 1) * self.share)

    def __len__(self) -> int:
        """Return the number of batches of an epoch on this rank."""
        return self.order.rollouts_per_epoch * self.slots

    def __iter__(self) -> Iterator[Batch]:
        # All of this runs at the first `next`: Lightning may make an iterator that it never uses.
        if self._continues:
            self._continues = False
        elif self.position:
            self._epoch, self.position = self._epoch + 1, 0
        yield from self.rest_of_epoch(self._epoch, self._epoch * self.order.rollouts_per_epoch)

    def rest_of_epoch(self, epoch: int, first_step: int) -> Iterator[Batch]:
        """Yield the batches of an epoch after `position`.

        Args:
            epoch: Number of the epoch, which decides its order.
            first_step: Number of its first step, over the run.
        """
        step, first_slot = divmod(self.position, self.slots)
        for index, whole in enumerate(self.rows_of_steps(epoch, range(step, self.order.rollouts_per_epoch)), step):
            for batch in self.batches(whole, first_step + index)[first_slot:]:
                self.position += 1
                yield batch
            first_slot = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "epoch": self._epoch, **self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved loader was.

        Raises:
            DataError: the state belongs to other data, and `allow_changed` is off.
        """
        if "epoch" not in state:
            raise DataError(
                "The checkpoint's run streamed its rows (data.stream_buffer), and this run reads all of them at once. "
                "Set data.stream_buffer to the value of the checkpoint's run."
            )
        (self.position,) = self.batches_of(state, "position")
        self._epoch, self._continues = state["epoch"], True
        if self.position >= self._last:
            self.position, self._epoch = 0, self._epoch + 1

    def identity(self) -> dict[str, Any]:
        """Return the part of a state that `batches_of` compares."""
        made_by = self.made_by(self.slots)
        return {"fingerprint": self.fingerprint, "made_by": made_by, "slots": self.slots, "world_size": self.world_size}

    def batches_of(self, state: Mapping[str, Any], *counts: str) -> list[int]:
        """Return numbers of batches in a state; with another number of ranks those of whole steps of this run.

        Args:
            state: State of the loader of the checkpoint's run.
            counts: Names of the numbers.

        Raises:
            DataError: the state belongs to other data, and `allow_changed` is off. The message names the settings that
                changed; where none did, the rows themselves.
        """
        other = state["world_size"] != self.world_size
        slots = state["slots"] if other else self.slots
        if state["fingerprint"] != self.fingerprint_of(slots):
            self._accept_changed_data(state["made_by"], self.made_by(slots))
        return [whole_steps(state[name], slots) * self.slots if other else state[name] for name in counts]

    def _accept_changed_data(self, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
        """Refuse data that are not the checkpoint's, or say what is other about them."""
        changed = [name for name in current if name in saved and name != "rows" and saved[name] != current[name]]
        changes = [f"{name} {_describe_change(saved[name], current[name])}" for name in changed]
        if not changes and saved["rows"] != current["rows"]:
            changes = [f"the rows themselves, {saved['rows']} -> {current['rows']} of them"]
        elif not changes:
            changes = ["the rows themselves (as many as before: their texts, their columns or their order in the file)"]
        if not self.allow_changed:
            raise DataError(
                f"The data is not the checkpoint's: {', '.join(changes)}. So the run cannot go on exactly. Restore "
                f"{'it' if len(changes) == 1 else 'them'}, or accept it with data.allow_changed=true."
            )
        rank_zero_info(
            f"Going on with other data than the checkpoint's run (data.allow_changed=true): {', '.join(changes)}."
        )

    def made_by(self, slots: int) -> dict[str, Any]:
        """Return what decides which row is in which batch, by the names of settings, as plain values."""
        order = self.order
        weights = None if order.weights is None else ", ".join(map(str, order.weights))
        return {
            **self.row_settings,
            "rows": sum(order.sizes),
            "data.seed": order.seed,
            "data.shuffle": order.shuffle,
            self.size_key: order.prompts_per_rollout,
            "the weights of data.sources": weights,
            f"the micro-batches of a step ({self.cut_keys})": f"{slots}{self.describe_dealing(slots)}",
        }

    @property
    def fingerprint(self) -> str:
        """Equal where the same position means the same batch: it covers the rows, their order and the slots."""
        return self.fingerprint_of(self.slots)

    def fingerprint_of(self, slots: int) -> str:
        """Return the fingerprint for another number of slots."""
        text = f"{self._data}{self.describe_dealing(slots)} {self.order} {slots}{self.describe_draws()}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _describe_change(before: Any, now: Any) -> str:
    """Return a change of a setting in words; of strings a mark is noted, so that no secret is in a checkpoint."""
    marked = any(isinstance(each, str) and each.startswith("#") for each in (before, now))
    return "changed" if marked else f"{before} -> {now}"


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as a checkpoint notes them: numbers as they are, of all else a mark."""
    found = {}
    for name, value in settings.items():
        if value is None or isinstance(value, bool | int | float):
            found[name] = value
            continue
        text = fingerprint_of(value) if callable(value) else repr(value)
        found[name] = text_digest(text if " at 0x" not in text else type(value).__qualname__)
    return found


def last_batch(batches: int, limit: int | float) -> int:
    """Return the number of batches of an epoch that `trainer.limit_train_batches` leaves: a number of them, or a share
    if it is a float."""
    return int(batches * limit) if isinstance(limit, float) else min(limit, batches)


def whole_steps(batches: int, slots: int) -> int:
    """Return the number of steps of `slots` batches that were begun."""
    return -(-batches // slots)


class RolloutLoader(SlottedLoader[PromptBatch]):
    """A loader of this rank's prompts of every rollout, each yielded `repeat` times as slots 0 to `repeat - 1`.

    Args:
        data: The rows.
        order: The order that assigns rows to each rollout.
        repeat: Slots of a rollout: micro-batches that Lightning's loop takes of it.
        ahead: Number of later rollouts whose prompts slot 0 brings too, `PromptBatch.upcoming`.
        run: Length of the run, `(rollouts, epochs)`: infinite where nothing ends it. Nothing comes after its end.
        draws: The draws of a curriculum over the same rows and order: they assign rows in its place, and an epoch is a
            number of rollouts only. Their state belongs to that of the loader.
        position: Further arguments of `SlottedLoader`.
    """

    def __init__(
        self,
        data: PromptSet,
        order: RolloutOrder,
        *,
        repeat: int = 1,
        ahead: int = 0,
        run: tuple[float, float] = (math.inf, math.inf),
        draws: RowDraws | None = None,
        **position: Any,
    ) -> None:
        self.data, self.ahead, self.run, self.draws = data, ahead, run, draws
        super().__init__(data.fingerprint, order, slots=repeat, **position)

    def rows_of_steps(self, epoch: int, steps: range) -> Iterator[list[int]]:
        if self.draws is None:
            yield from super().rows_of_steps(epoch, steps)
            return
        for index in steps:  # one at a time: a draw knows the rollouts before it
            yield self.draws.begin(epoch * self.order.rollouts_per_epoch + index)

    def describe_draws(self) -> str:
        return "" if self.draws is None else f" {self.draws.curriculum.describe()}"

    def made_by(self, slots: int) -> dict[str, Any]:
        return super().made_by(slots) | {"data.curriculum": self.describe_draws().strip() or None}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({} if self.draws is None else {"draws": self.draws.state()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.draws is not None and "draws" in state:
            self.draws.load_state(state["draws"], same_rows=state["fingerprint"] == self.fingerprint_of(state["slots"]))

    def batches(self, rows: list[int], number: int) -> list[PromptBatch]:
        batch = self._batch(rows, number)
        upcoming = self._upcoming(number)
        return [dataclasses.replace(batch, slot=slot, upcoming=() if slot else upcoming) for slot in range(self.slots)]

    def _batch(self, rows: list[int], number: int) -> PromptBatch:
        occurrences = count_occurrences(rows)[self.own_rows]
        batch = self.data.batch(rows[self.own_rows], occurrences=occurrences, rollout=number)
        batch.sharing, batch.share = self.sharing, self.rank % self.sharing
        return batch

    def _upcoming(self, number: int) -> tuple[PromptBatch, ...]:
        """Return this rank's prompts of the next `ahead` rollouts, over epochs; fewer where the run ends before."""
        steps = self.order.rollouts_per_epoch
        used = -(-self._last // self.slots)  # of an epoch that `limit_train_batches` cuts
        (epoch, index), (rollouts, epochs), found = divmod(number, steps), self.run, []
        for _ in range(self.ahead):
            epoch, index = (epoch, index + 1) if index + 1 < used else (epoch + 1, 0)
            if epoch >= epochs or epoch * used + index >= rollouts:
                break
            number = epoch * steps + index
            if self.draws is None:
                (rows,) = self.rows_of_steps(epoch, range(index, index + 1))
            else:
                rows = self.draws.rows(number)
            found.append(self._batch(rows, number))
        return tuple(found)


class EvalLoader:
    """A loader that yields the first `limit` rows in their order, once.

    Every rank yields the same number of batches, and of the same sizes: where rows do not divide over the ranks, the
    first rows come a second time at the end. A caller that gathers results keeps one of each row in `PromptBatch.rows`.

    Args:
        data: The rows.
        batch_size: Prompts of a batch on each rank; the last batch may be smaller.
        limit: Number of rows to take; None takes all.
        rank: Index of this rank's part.
        world_size: Number of parts, one for each rank.
    """

    def __init__(
        self, data: PromptSet, *, batch_size: int = 64, limit: int | None = None, rank: int = 0, world_size: int = 1
    ) -> None:
        in_range("data.val_batch_size", batch_size, low=1)
        in_range("evaluation.limit", 1 if limit is None else limit, low=1)
        self.data = data
        self.batch_size = batch_size
        count = len(data) if limit is None else min(limit, len(data))
        padded = -(-count // world_size) * world_size
        self._rows = [i % count for i in range(rank, padded, world_size)]

    def __len__(self) -> int:
        return -(-len(self._rows) // self.batch_size)

    def __iter__(self) -> Iterator[PromptBatch]:
        for start in range(0, len(self._rows), self.batch_size):
            yield self.data.batch(self._rows[start : start + self.batch_size])


_SEED_OFFSET = 2**40
"""Added to the seed: the second pass must not meet the prompts in the order of the first."""

FIRST_OCCURRENCE = 2**20
"""First occurrence number of a spare prompt: its noise is never that of the same row in the rollout proper."""


class SparePrompts:
    """The training rows in an endless order of their own, addressed by position; under a curriculum drawn by it.

    The epochs themselves are left as they are, so that the number of optimizer steps, the schedule and the position of
    the loader do not depend on how many groups are dropped.
    """

    def __init__(self, data: PromptSet, order: RolloutOrder, draws: RowDraws | None = None) -> None:
        self.data, self.draws = data, draws
        self._order = dataclasses.replace(order, prompts_per_rollout=1, seed=order.seed + _SEED_OFFSET)

    def batch(self, positions: range, *, rollout: int, first: int) -> PromptBatch:
        """Return spare prompts `first`, `first + 1`, ... of rollout number `rollout`.

        Args:
            positions: Their positions in the order, over all rollouts. Under a curriculum they are drawn for each
                rollout, by what is known of the rows, and only the number of positions counts.
            rollout: Number of the rollout.
            first: Number of spare prompts of this rollout before them.
        """
        if self.draws is not None:
            chosen = self.draws.spare_rows(rollout, range(first, first + len(positions)))
        else:
            size = self._order.rollouts_per_epoch
            rows = {epoch: self._order.epoch(epoch) for epoch in {position // size: None for position in positions}}
            chosen = [rows[position // size][position % size] for position in positions]
        occurrences = [FIRST_OCCURRENCE + first + i for i in range(len(chosen))]
        return self.data.batch(chosen, occurrences=occurrences, rollout=rollout)


class ExampleLoader(SlottedLoader[ExampleBatch]):
    """A loader of this rank's micro-batches of every optimizer step, as slots 0 to `accumulate - 1`.

    Every micro-batch knows what its whole step counts, so a loss has the step's denominator without asking other ranks.

    Args:
        data: The rows.
        order: The order that assigns rows to each optimizer step.
        accumulate: Micro-batches of a step on each rank.
        group_by_length: Put rows of a step that are about as long into the same micro-batch, so that short ones are not
            padded to the longest: slots go from long rows to short ones, and ranks take neighbours in each. Off, a
            rank has neighbours in the step's order.
        position: Further arguments of `SlottedLoader`.
    """

    size_key = "data.batch_size"
    cut_keys = "trainer.accumulate_grad_batches, data.group_by_length"

    def __init__(
        self,
        data: ExampleSet,
        order: RolloutOrder,
        *,
        accumulate: int = 1,
        group_by_length: bool,
        **position: Any,
    ) -> None:
        super().__init__(data.fingerprint, order, slots=accumulate, **position)
        self.data, self.group_by_length = data, group_by_length

    def describe_dealing(self, slots: int) -> str:
        return " by length" if self.group_by_length and slots > 1 else ""

    def batches(self, rows: list[int], number: int) -> list[ExampleBatch]:
        totals = self.data.totals(rows, self.slots * self.world_size)
        before = self.data.before(rows)
        micro = [
            self.data.batch([rows[i] for i in places], [before[i] for i in places], totals, step=number, slot=slot)
            for slot, places in enumerate(self._places(rows))
        ]
        whole = tuple(micro) if self.slots > 1 else ()
        return [dataclasses.replace(micro[0], whole=whole), *micro[1:]]

    def _places(self, rows: list[int]) -> list[list[int]]:
        """Return, for each micro-batch of this rank, the places of its rows in the step, ascending."""
        size = self.share // self.slots
        if not self.group_by_length:
            own = range(len(rows))[self.own_rows]
            return [list(own[slot * size : (slot + 1) * size]) for slot in range(self.slots)]
        # Sorting is stable and looks at nothing else, so every rank and every resumed run finds the same order.
        falling = sorted(range(len(rows)), key=lambda i: -self.data.length(rows[i]))
        # Neighbours stay together, so a step has the same micro-batches whatever the number of ranks they are dealt to.
        begins = [(slot * self.world_size + self.rank) * size for slot in range(self.slots)]
        return [sorted(falling[begin : begin + size]) for begin in begins]


class ExampleEvalLoader:
    """A loader that yields the first `limit` rows in their order, once; every rank yields as many batches, none of them
    empty.

    All of them together count as one step, so that a loss does not depend on how they are cut.

    Args:
        data: The rows.
        batch_size: Rows of a batch on each rank; batches are evened out, so some are smaller, and where rows do not
            divide over the ranks one may be larger.
        limit: Number of rows to take; None takes all.
        rank: Index of this rank's part.
        world_size: Number of parts, one for each rank.

    Raises:
        ConfigError: fewer rows than ranks.
    """

    def __init__(
        self, data: ExampleSet, *, batch_size: int, limit: int | None = None, rank: int = 0, world_size: int = 1
    ) -> None:
        self.data = data
        count = len(data) if limit is None else min(limit, len(data))
        if count < world_size:
            raise ConfigError(
                f"A validation set has {count} rows for {world_size} ranks: every rank needs one at least."
            )
        batches = max(1, min(-(-count // (world_size * batch_size)), count // world_size))
        parts = batches * world_size
        bounds = [count * i // parts for i in range(parts + 1)]
        self._parts = [list(range(bounds[i], bounds[i + 1])) for i in range(rank, parts, world_size)]
        self._totals = data.totals(range(count), parts)
        self._before = data.before(range(count))

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[ExampleBatch]:
        for number, rows in enumerate(self._parts):
            before = [self._before[row] for row in rows]
            yield self.data.batch(rows, before, self._totals, step=number, slot=0)
