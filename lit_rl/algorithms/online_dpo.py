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

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lit_rl.algorithms.families.judged import JudgedPairs
from lit_rl.core.rollout import Rollout
from lit_rl.models.forward import TokenScores
from lit_rl.models.loaded_model import ModelLike
from lit_rl.ops.preference_losses import sigmoid
from lit_rl.ops.reductions import Metrics, StepTokens, StepTotals
from lit_rl.rewards.judges import Judge
from lit_rl.rewards.weighted_rewards import Rewards


class OnlineDPO(JudgedPairs):
    """Online direct preference optimisation.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function, whose sum the default judge compares.
        judge: Judge of which of two completions is better. None compares the summed rewards.
        beta: Scale of the implicit reward beta (log pi - log pi_ref), above 0; or a list, one for each epoch.
        preference: The loss of a pair, or several by name, which are added with their weights.
        group_size: Completions a prompt, 2 or more.
        shared: Arguments of every `JudgedPairs` and `JudgedModule`.
    """

    def __init__(
        self,
        model: ModelLike,
        reward: Rewards | Callable | None = None,
        *,
        judge: Judge | Callable[..., Any] | None = None,
        beta: float | Sequence[float] = 0.1,
        preference: Callable | dict[str, Callable] = sigmoid,
        group_size: int = 2,
        **shared: Any,
    ) -> None:
        super().__init__(model, reward, judge=judge, beta=beta, preference=preference, group_size=group_size, **shared)

    def loss(
        self, rollout: Rollout, scores: TokenScores, totals: StepTotals, step: StepTokens | None = None
    ) -> tuple[Tensor, Metrics]:
        return self.preference_loss(rollout, scores, totals)
