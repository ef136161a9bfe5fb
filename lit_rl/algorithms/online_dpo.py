"""Online DPO: DPO on pairs of the policy's own fresh completions, arXiv:2402.04792 (OAIF).

For a prompt, the judge compares two completions of the policy and prefers c to r; y is either of them:

    log ratio      rho_y = sum_t log pi(y_t) - log pi_ref(y_t)
    objective      mean over judged pairs of sum_k weight_k preference_k(c, r)
                   sigmoid is - log sigma(beta (rho_c - rho_r))

The judge compares rewards (the default), or is a function or a language model that compares texts. A tie, and a pair
without a verdict, is in neither the sum nor the mean. With more completions a prompt, the pair is the one with the
highest and the one with the lowest win rate.
"""

from __future__ import annotations

from torch import Tensor

from lit_rl.algorithms.families.judged import JudgedPairs
from lit_rl.core.rollout import Rollout
from lit_rl.models.forward import TokenScores
from lit_rl.ops.reductions import Metrics, StepTokens, StepTotals
from lit_rl.settings.algorithms import OnlineDPOConfig
from lit_rl.settings.base import takes


class OnlineDPO(JudgedPairs):
    """Online direct preference optimisation."""

    @takes(OnlineDPOConfig)
    def __init__(self, settings: OnlineDPOConfig) -> None:
        super().__init__(config=settings)

    def loss(
        self, rollout: Rollout, scores: TokenScores, totals: StepTotals, step: StepTokens | None = None
    ) -> tuple[Tensor, Metrics]:
        return self.preference_loss(rollout, scores, totals)
