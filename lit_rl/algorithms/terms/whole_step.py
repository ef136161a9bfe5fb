"""Losses that couple rows: what all rows of an optimizer step are like, before the first of them is learned from.

With dropout the score of a row is drawn. So the first look at a step has the policy in training mode, and every
micro-batch uses the dropout masks of that look again: a row has one score, in its own loss and in the losses of others,
and a step that is cut has the distribution of one that is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.rollouts.state import rng_state, set_rng_state
from lit_rl.examples import ExampleBatch

Look = Callable[[Any], dict[str, Tensor]]
"""From a micro-batch to columns `(b,)` by name, without gradient."""


@dataclass(frozen=True)
class Noise:
    """Where the random numbers stand that dropout draws: those of the CPU and those of the device."""

    device: torch.device | str
    states: dict[str, Tensor]
    """By the type of the device."""

    @classmethod
    def of(cls, device: torch.device | str) -> Noise:
        return cls(device, rng_state(device))

    @property
    def is_current(self) -> bool:
        """Whether nothing was drawn since."""
        return all(torch.equal(state, self.states[kind]) for kind, state in rng_state(self.device).items())

    def restore(self) -> None:
        set_rng_state(self.states, self.device)


@dataclass(frozen=True)
class WholeStep:
    """Columns of all rows of an optimizer step, over all its micro-batches on all ranks, without gradient."""

    columns: dict[str, Tensor]
    """`(n,)` each, by name."""
    first: int
    """Place of this rank's first row."""
    noise: tuple[Noise | None, ...] = ()
    """Of each micro-batch on this rank: the state of the random numbers before its look, None if it drew none."""

    @classmethod
    @torch.no_grad()
    def of(cls, look: Look, batch: ExampleBatch, ranks: Ranks) -> WholeStep:
        """One more forward pass over this rank's part of the step, in the policy's mode. A collective.

        Args:
            look: What a row's loss may know of the others.
            batch: The step's first micro-batch.
            ranks: Who shares the step.
        """
        parts, noise = [], []
        for micro in batch.whole or (batch,):
            before = Noise.of(ranks.device)
            parts.append(look(micro.to(ranks.device)))
            noise.append(None if before.is_current else before)
        mine = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        rows = len(next(iter(mine.values())))
        columns = {name: ranks.gather(column) for name, column in mine.items()}
        return cls(columns, ranks.rank * rows, tuple(noise))

    def draw_again(self, batch: ExampleBatch) -> None:
        """Set the random state to that of this micro-batch's look, so that dropout draws the same numbers again.

        The offline loop calls this before the loss of a micro-batch. The last micro-batch of a step leaves the random
        state as the look left it, so the next step draws new numbers.
        """
        if self.noise and (before := self.noise[batch.slot]) is not None:
            before.restore()

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
