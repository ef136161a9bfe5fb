"""Learn from the best completion of each group: the selection of RAFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lit_rl.algorithms.terms.groups import Selected
from lit_rl.errors import ConfigError
from lit_rl.rewards.sums.weighted import Scores
from lit_rl.rollout import Completions, PromptBatch

if TYPE_CHECKING:
    from lit_rl.algorithms.loop.on_policy import OnPolicyModule


@dataclass(frozen=True)
class BestOfGroup:
    """Learn from the completion with the highest reward of each group alone: RAFT (2304.06767, algorithm 1).

    The others take no part in the loss or in its denominator. Of several best ones the first is taken: the order of the
    samples of a prompt says nothing about them, so it is a fair draw, and the same one on every machine. A group in
    which all rewards are equal gives one too. A completion without a reward is never the best; a group without any
    scored one takes no part.

    Logged: `groups/best_reward` (mean reward of the chosen ones), `groups/tied` (share of groups with several best) and
    `groups/unscored` (groups without a scored completion, over all ranks).
    """

    def __call__(
        self, module: OnPolicyModule, batch: PromptBatch, completions: Completions, scores: Scores
    ) -> Selected:
        self.fits(module)
        rewards = scores.total.double().reshape(len(batch), -1)
        lowest = rewards.masked_fill(rewards.isnan(), -torch.inf)
        highest, best = lowest.max(1, keepdim=True)  # of equal ones the first
        scored = ~rewards.isnan().all(1, keepdim=True)
        kept = torch.zeros(rewards.shape, dtype=torch.bool).scatter_(1, best, scored)
        tied = ((lowest == highest) & scored).sum(1) > 1
        count = scored.sum().double()
        one = torch.ones((), dtype=torch.float64)
        everyones = float(sum(module.counts_of_ranks(int((~scored).sum()))))
        module.record(
            {
                "groups/best_reward": (rewards[kept].sum(), count),
                "groups/tied": (tied.sum().double(), count),
                # Every rank adds the same count, so that the average over ranks is the count.
                "groups/unscored": (one * everyones, one),
            }
        )
        return batch, completions, scores, kept.flatten().to(completions.group_id.device)

    @staticmethod
    def fits(module: OnPolicyModule) -> None:
        """Raises ConfigError: there is nothing to choose from, or the advantage compares the one with the others."""
        if module.group_size < 2:
            raise ConfigError(
                f"algo.group_size={module.group_size} with algo/groups=best: the best of one completion is that one, "
                "so nothing would be learned of the rewards. Take 2 or more."
            )
        if getattr(module, "compares_completions", False):
            raise ConfigError(
                "algo/groups=best leaves one completion a group, and this advantage compares several: it would be 0 "
                "everywhere. Take algo/advantage=constant (algo=raft), or algo/groups=top."
            )

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, saved: dict[str, Any]) -> None:
        pass
