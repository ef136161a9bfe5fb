"""Prompts beyond those of the epochs: what a rollout is refilled from when groups of it are dropped."""

from __future__ import annotations

import dataclasses

from lit_rl.data.order import RolloutOrder
from lit_rl.data.prompt_set import PromptSet
from lit_rl.rollout import PromptBatch

_APART = 2**40
"""Added to the seed: the second pass must not meet the prompts in the order of the first."""

OCCURRENCE = 2**20
"""First occurrence number of a spare prompt: its noise is never that of the same row in the rollout proper."""


class SparePrompts:
    """The training rows in an endless order of their own, addressed by position.

    The epochs themselves are left as they are, so that the number of optimizer steps, the schedule and the position of
    the loader do not depend on how many groups are dropped.
    """

    def __init__(self, data: PromptSet, order: RolloutOrder) -> None:
        self.data = data
        self._order = dataclasses.replace(order, prompts_per_rollout=1, seed=order.seed + _APART)

    def batch(self, positions: range, *, rollout: int, first: int) -> PromptBatch:
        """Return the rows at `positions`, for rollout number `rollout`, of which they are spare prompts `first`, ..."""
        size = self._order.rollouts_per_epoch
        epochs = {position // size: None for position in positions}
        rows = {epoch: self._order.epoch(epoch) for epoch in epochs}
        chosen = [rows[position // size][position % size] for position in positions]
        occurrences = [OCCURRENCE + first + i for i in range(len(chosen))]
        return self.data.batch(chosen, occurrences=occurrences, rollout=rollout)
