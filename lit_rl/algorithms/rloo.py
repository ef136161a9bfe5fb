"""RLOO: REINFORCE leave-one-out, arXiv:2402.14740 (Back to Basics), in TRL 1.16's vetted setting.

For G completions of one prompt, each with a reward:

    reward      R_i <- R_i - reward_beta sum_t (old_logprobs_it - ref_logprobs_it)   the sequence's k1 KL
    advantage   A_i = R_i - mean of the other G - 1 rewards
    ratio       r_i = exp(sum_t (logprobs_it - old_logprobs_it))                     of the whole sequence
    objective   - min(r_i A_i, clip(r_i, 1 - clip_low, 1 + clip_high) A_i), averaged over sequences

With one optimizer step a rollout the ratio is 1 and this is the paper's estimator. All further terms, off by default,
are in `lit_rl.algorithms.families.policy_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.models.loaded_model import ModelLike
from lit_rl.ops.advantages import leave_one_out
from lit_rl.ops.engine_mismatch import auto_correction
from lit_rl.ops.kl import corrected_k3
from lit_rl.ops.policy_losses import clipped_policy_loss, sequence_sum_ratio
from lit_rl.ops.reductions import sequence_mean
from lit_rl.rewards.weighted_rewards import Rewards

SEQUENCE_CLIPPED = partial(clipped_policy_loss, ratio=sequence_sum_ratio)
"""The clipped surrogate with the ratio of the whole sequence."""


class RLOO(PolicyGradient):
    """REINFORCE leave-one-out.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function.
        advantage: Estimator of advantages from rewards.
        loss: The loss of each token.
        reduction: The average of the loss over tokens and sequences.
        reward_beta: Weight of the KL in the reward.
        group_size: Completions a prompt, 2 or more.
        terms: All other arguments of `PolicyGradient`.
    """

    def __init__(
        self,
        model: ModelLike,
        reward: Rewards | Callable,
        *,
        advantage: Callable = leave_one_out,
        loss: Callable = SEQUENCE_CLIPPED,
        kl: Callable = corrected_k3,
        reduction: Callable = sequence_mean,
        correction: Callable | None = auto_correction,
        reward_beta: float = 0.05,
        group_size: int = 2,
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
            reward_beta=reward_beta,
            group_size=group_size,
            **terms,
        )
