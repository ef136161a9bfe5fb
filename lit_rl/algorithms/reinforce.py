"""REINFORCE and its variants: one completion a prompt is enough, because nothing is compared within a group.

    token rewards  r_it = R_i at the last token - reward_beta (old_logprobs_it - ref_logprobs_it)
    advantage      A_it = whiten(sum_{s >= t} r_is)                  REINFORCE++, arXiv:2501.03262, the default
    objective      - min(r_it A_it, clip(r_it, 1 - clip_low, 1 + clip_high) A_it), averaged over tokens

`algo=reinforce` is the plain estimator (Williams, 1992): the reward itself as advantage, and no clip; `algo=remax`
takes the reward of the greedy completion as baseline (2310.10505). All further terms, off by default, are in
`lit_rl.algorithms.families.policy_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.models.loaded_model import ModelLike
from lit_rl.ops.engine_mismatch import auto_correction
from lit_rl.ops.kl import corrected_k3
from lit_rl.ops.policy_losses import clipped_policy_loss
from lit_rl.ops.reductions import token_mean
from lit_rl.ops.returns import reinforce_plus_plus
from lit_rl.rewards.weighted_rewards import Rewards


class Reinforce(PolicyGradient):
    """REINFORCE++ by default; REINFORCE, ReMax and the like with their advantage and loss.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function.
        advantage: Estimator of advantages from rewards.
        group_size: Completions a prompt, 1 or more.
        terms: All other arguments of `PolicyGradient`.
    """

    def __init__(
        self,
        model: ModelLike,
        reward: Rewards | Callable,
        *,
        advantage: Callable = reinforce_plus_plus,
        loss: Callable = clipped_policy_loss,
        kl: Callable = corrected_k3,
        reduction: Callable = token_mean,
        correction: Callable | None = auto_correction,
        group_size: int = 1,
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
            group_size=group_size,
            **terms,
        )
