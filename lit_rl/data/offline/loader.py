"""Iterables of micro-batches of examples, exact to resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from lit_rl.data.loader import SlottedLoader
from lit_rl.data.offline.example_set import ExampleSet
from lit_rl.data.order import RolloutOrder
from lit_rl.errors import ConfigError
from lit_rl.examples import ExampleBatch


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

    def dealt(self, slots: int) -> str:
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
            ours = range(len(rows))[self.ours]
            return [list(ours[slot * size : (slot + 1) * size]) for slot in range(self.slots)]
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
