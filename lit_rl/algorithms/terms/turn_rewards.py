"""A warning for per-turn rewards with `process_supervised`, which gives no credit for longer episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.algorithms.signatures import unwrapped
from lit_rl.ops.returns import process_supervised
from lit_rl.rewards.functions.contract import of_a_turn


class TurnRewards:
    """A warning, given once, if rewards of turns are used with `process_supervised`.

    That estimator compares a step with the mean over all steps of the group. Four episodes that earn 1 a turn over one
    to three turns then have advantage 0 at every token, though each further turn adds 1: it compares the rewards of
    turns, and not their number.

    Args:
        estimator: The estimator of the advantages.
    """

    def __init__(self, estimator: Callable[..., Any]) -> None:
        self._normalises_steps, self._warned = unwrapped(estimator) is process_supervised, False

    def look(self, scored: Scored) -> None:
        """Warn if the rollout has rewards of turns. Called before they are credited."""
        if not self._normalises_steps or self._warned or scored.completions.turn is None:
            return
        if any(of_a_turn(part) for parts in scored.scores.span_rewards or () for part in parts):
            self._warned = True
            rank_zero_warn(
                "algo/advantage=process_supervised compares the reward of a turn with the mean over all turns of its "
                "group, so an episode gains nothing by going on: where every turn earns the same, every advantage is "
                "0, however many turns there were. Take algo/advantage=centered_turns, which compares what was earned "
                "from a turn on with that of the group's other turns of its number, or centered_return_to_go."
            )
