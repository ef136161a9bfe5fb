"""XPO: exploratory preference optimisation, arXiv:2405.21046 (algorithm 1).

For a prompt, y is a completion of the policy and y' one of the reference; the judge prefers c of them to r:

    log ratio      rho_y = sum_t log pi(y_t) - log pi_ref(y_t)
    objective      mean over judged pairs of preference(c, r) + alpha sum_t log pi(y'_t)
                   preference is - log sigma(beta (rho_c - rho_r))

The second term, the exploration bonus, takes probability from completions of the reference, and so gives it to unseen
ones. A tie, and a pair without a verdict, is in neither the sum nor the mean, with its bonus.
"""

from __future__ import annotations

from torch import Tensor

from lit_rl.algorithms.checks import preference_checks
from lit_rl.algorithms.families.judged import JudgedPairs, learned_pairs
from lit_rl.algorithms.rollouts.scored import generate_opponent_pairs
from lit_rl.core.rollout import Completions, PromptBatch, Rollout
from lit_rl.models.forward import TokenScores
from lit_rl.ops.reductions import Metrics, StepTokens, StepTotals, masked_sum, mean_of
from lit_rl.settings.algorithms import XPOConfig
from lit_rl.settings.base import takes


class XPO(JudgedPairs):
    """Exploratory preference optimisation. Each prompt has a completion of the policy and one of the reference."""

    opponent_writes = True

    @takes(XPOConfig)
    def __init__(self, settings: XPOConfig) -> None:
        super().__init__(config=settings)
        self.alpha = settings.alpha
        preference_checks.check_two_policies(type(self).__name__, self.group_size, self.reference)

    def draw_rollout(self, batch: PromptBatch) -> Completions:
        """Generate a completion of the policy and one of the reference for each prompt."""
        own = self.own_completions(batch)
        with self.reference.scoring(self.policy, self.reference_policy) as reference:
            return generate_opponent_pairs(
                self.source, self.request(batch, group_size=1), own, reference, self.reference_policy
            )

    def loss(
        self, rollout: Rollout, scores: TokenScores, totals: StepTotals, step: StepTokens | None = None
    ) -> tuple[Tensor, Metrics]:
        loss, metrics = self.preference_loss(rollout, scores, totals)
        of_reference = masked_sum(scores.logprobs, rollout.loss_mask, 1)[1::2]
        learned = rollout.loss_mask.any(1)[1::2]
        pairs = learned_pairs(totals).to(loss.device)
        bonus = self.at_epoch(self.alpha) * of_reference
        parts = {
            "loss/dpo": (loss.detach() * pairs, learned.sum().float()),
            "loss/xpo": (bonus.detach().sum(), learned.sum().float()),
        }
        policy_rewards, reference_rewards = rollout.rewards[0::2], rollout.rewards[1::2]
        parts["objective/model_scores"] = mean_of(policy_rewards, ~policy_rewards.isnan())
        parts["objective/ref_scores"] = mean_of(reference_rewards, ~reference_rewards.isnan())
        return loss + bonus.sum() / pairs, metrics | parts

    def coefficients(self) -> dict[str, float]:
        return super().coefficients() | {"alpha": self.at_epoch(self.alpha)}
