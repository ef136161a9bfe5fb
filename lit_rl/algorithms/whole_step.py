"""Losses that couple rows: what all rows of an optimizer step are like, before the first of them is learned from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_rl.examples import ExampleBatch

if TYPE_CHECKING:
    from lit_rl.algorithms.offline import OfflineModule


@dataclass(frozen=True)
class WholeStep:
    """Columns of all rows of an optimizer step, over all its micro-batches on all ranks, without gradient."""

    columns: dict[str, Tensor]
    """`(n,)` each, by name."""
    first: int
    """Place of this rank's first row."""

    @classmethod
    @torch.no_grad()
    def of(cls, module: OfflineModule, batch: ExampleBatch) -> WholeStep:
        """One more forward pass over this rank's part of the step.

        Args:
            module: Asked for its columns by `look`.
            batch: The step's first micro-batch.
        """
        was_training = module.policy.training
        module.policy.eval()
        try:
            parts = [module.look(micro.to(module.device)) for micro in batch.whole or (batch,)]
        finally:
            module.policy.train(was_training)
        mine = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        rows = len(next(iter(mine.values())))
        everyone = {name: module.everyones(column) for name, column in mine.items()}
        return cls(everyone, module.global_rank * rows)

    def place(self, batch: ExampleBatch) -> slice:
        """Where the rows of a micro-batch stand."""
        start = self.first + batch.slot * len(batch)
        return slice(start, start + len(batch))

    def with_gradient(self, batch: ExampleBatch, **live: Tensor) -> dict[str, Tensor]:
        """All columns, with those of this micro-batch put in with their gradient."""
        place = self.place(batch)
        joined = dict(self.columns)
        for name, column in live.items():
            all_rows = self.columns[name]
            joined[name] = torch.cat([all_rows[: place.start], column.to(all_rows.dtype), all_rows[place.stop :]])
        return joined


def share_of(function: Callable[..., Tensor], batch: ExampleBatch, whole: WholeStep | None, **live: Tensor) -> Tensor:
    """`(b,)`: this micro-batch's rows of a loss over all rows of the step.

    Their values sum to the loss of these rows, and their gradient is that of the loss of *all* rows with respect to
    these: summed over micro-batches, it is the gradient of the step.

    Args:
        function: Of columns by name, to one loss a row.
        batch: The micro-batch.
        whole: What `look` said of the step. None: the micro-batch is the step.
        live: This micro-batch's columns, with gradient.
    """
    if whole is None:
        return function(**live)
    every_row = function(**whole.with_gradient(batch, **live))
    mine = every_row[whole.place(batch)]
    others = every_row.sum() - mine.sum()
    return mine + (others - others.detach()) / len(mine)
