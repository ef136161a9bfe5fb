"""Losses that couple the rows of an optimizer step: columns of all its rows, computed before its first micro-batch.

With dropout the score of a row is random. So the first pass over a step has the policy in training mode, and every
micro-batch reuses the dropout masks of that pass: a row has one score, in its own loss and in the losses of others, and
a step has the same distribution however it is split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.rollouts.checkpoints import rng_state, set_rng_state
from lit_rl.core.examples import ExampleBatch

StepColumns = Callable[[Any], dict[str, Tensor]]
"""A function from a micro-batch to columns `(b,)` by name, without gradient."""


@dataclass(frozen=True)
class WholeStep:
    """Columns of all rows of an optimizer step, over all micro-batches on all ranks, without gradient."""

    columns: dict[str, Tensor]
    """Columns `(n,)` by name."""
    first: int
    """Index of this rank's first row."""
    device: torch.device | str = "cpu"
    noise: tuple[dict[str, Tensor] | None, ...] = ()
    """The `rng_state` before the first pass of each micro-batch on this rank; None if the pass drew no numbers."""

    @classmethod
    @torch.no_grad()
    def of(cls, columns_of: StepColumns, batch: ExampleBatch, ranks: Ranks) -> WholeStep:
        """Compute the columns in one more forward pass over this rank's part of the step. A collective.

        Args:
            columns_of: The columns that losses of other rows read.
            batch: The step's first micro-batch.
            ranks: The ranks that share the step.
        """
        device, parts, noise = ranks.device, [], []
        for micro in batch.whole or (batch,):
            before = rng_state(device)
            parts.append(columns_of(micro.to(device)))
            unchanged = all(torch.equal(state, before[kind]) for kind, state in rng_state(device).items())
            noise.append(None if unchanged else before)
        own_columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        rows = len(next(iter(own_columns.values())))
        columns = {name: ranks.gather(column) for name, column in own_columns.items()}
        return cls(columns, ranks.rank * rows, device, tuple(noise))

    def draw_again(self, batch: ExampleBatch) -> None:
        """Restore the random state of this micro-batch's first pass, so that dropout draws the same numbers again.

        The offline loop calls this before the loss of a micro-batch. The last micro-batch of a step leaves the random
        state as the first pass left it, so the next step draws new numbers.
        """
        if self.noise and (before := self.noise[batch.slot]) is not None:
            set_rng_state(before, self.device)

    def place(self, batch: ExampleBatch) -> slice:
        """Return the slice of the step's rows that a micro-batch has."""
        start = self.first + batch.slot * len(batch)
        return slice(start, start + len(batch))

    def with_gradient(self, batch: ExampleBatch, **live: Tensor) -> dict[str, Tensor]:
        """Return all columns, with gradient in the rows of this micro-batch."""
        place = self.place(batch)
        joined = dict(self.columns)
        for name, column in live.items():
            all_rows = self.columns[name]
            joined[name] = torch.cat([all_rows[: place.start], column.to(all_rows.dtype), all_rows[place.stop :]])
        return joined


def micro_batch_share(function: Callable[..., Tensor], batch: ExampleBatch, whole: WholeStep, **live: Tensor) -> Tensor:
    """Return this micro-batch's rows `(b,)` of a loss over all rows of the step.

    The values sum to the loss of these rows, and the gradient is that of the loss of *all* rows with respect to these:
    summed over micro-batches, it is the gradient of the step.

    Args:
        function: A function from columns by name to one loss a row.
        batch: The micro-batch.
        whole: The columns of the step.
        live: This micro-batch's columns, with gradient.
    """
    every_row = function(**whole.with_gradient(batch, **live))
    own_rows = every_row[whole.place(batch)]
    others = every_row.sum() - own_rows.sum()
    return own_rows + (others - others.detach()) / len(own_rows)
