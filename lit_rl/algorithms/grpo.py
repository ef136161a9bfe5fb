"""GRPO: group-relative policy optimisation, arXiv:2402.03300 (DeepSeekMath), equation 3, with TRL 1.16's defaults.

For G completions of one prompt, each with a reward:

    advantage   A_i = (R_i - mean(R)) / (std(R) + 1e-4)
    ratio       r_it = exp(logprobs_it - old_logprobs_it)
    objective   - min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i) + beta KL_it, averaged over tokens

The average over the tokens of the step is DAPO's (2503.14476); that of equation 3, over sequences, is
`algo/reduction=sequence`.

Advantage, loss, KL estimator and average are functions to choose (`algo/advantage`, `algo/loss`, `algo/kl`,
`algo/reduction`): DAPO, Dr. GRPO, GSPO, CISPO and the like are such choices, files in `conf/algo`, not classes. All
further terms, off by default, are in `lit_rl.algorithms.families.policy_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.models.loaded_model import ModelLike
from lit_rl.ops.advantages import group_normalized
from lit_rl.ops.engine_mismatch import auto_correction
from lit_rl.ops.kl import corrected_k3
from lit_rl.ops.policy_losses import clipped_policy_loss
from lit_rl.ops.reductions import token_mean
from lit_rl.rewards.weighted_rewards import Rewards


class GRPO(PolicyGradient):
    """Group-relative policy optimisation.

    Every keyword is documented in `PolicyGradient`; those that are named here have GRPO's defaults.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function.
        terms: All other arguments of `PolicyGradient`.
    """

    def __init__(
        self,
        model: ModelLike,
        reward: Rewards | Callable,
        *,
        advantage: Callable = group_normalized,
        loss: Callable = clipped_policy_loss,
        kl: Callable = corrected_k3,
        reduction: Callable = token_mean,
        correction: Callable | None = auto_correction,
        beta: float = 0.0,
        group_size: int = 8,
        **terms: Any,
    ) -> None:
        super().__init__(
            model,
            reward,
            advantage=advantage,
            loss=loss,
            kl=kl,
            reduction=reduction,
            correction=correction,
            beta=beta,
            group_size=group_size,
            **terms,
        )
