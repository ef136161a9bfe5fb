"""Spare prompts, beyond those of the epochs, that dynamic groups draw in place of groups that teach nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.rewards.sums.weighted import Scores
from lit_rl.rollout import Completions, PromptBatch


@dataclass(frozen=True)
class Spare:
    """Prompts beyond those of the epochs, completed and scored like those of the rollout."""

    datamodule: Any
    draw_now: Callable[[PromptBatch], Completions]
    """Function that completes prompts to learn from."""
    generate: Callable[..., Completions]
    """Function that completes a prompt to discard, where engine calls are collective."""
    reward: Callable[[PromptBatch, Completions], Scores]
    exact: bool
    """Whether the generator is the policy itself, so that each rank can draw alone."""

    def draw(self, positions: range, *, rollout: int, first: int) -> Scored:
        """Complete and score the prompts at these positions of the spare order."""
        batch = self.datamodule.spare.batch(positions, rollout=rollout, first=first)
        completions = self.draw_now(batch)
        return Scored(batch, completions, self.reward(batch, completions))

    def keep_pace(self, position: int, *, rollout: int, first: int) -> None:
        """Generate and discard one completion, so that every rank makes the same number of engine calls."""
        if not self.exact:
            one = self.datamodule.spare.batch(range(position, position + 1), rollout=rollout, first=first)
            self.generate(one, group_size=1)
