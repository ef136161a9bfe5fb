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

from functools import partial

from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.ops.policy_losses import clipped_policy_loss, sequence_sum_ratio
from lit_rl.settings.algorithms import RLOOConfig
from lit_rl.settings.base import takes

SEQUENCE_CLIPPED = partial(clipped_policy_loss, ratio=sequence_sum_ratio)
"""The clipped surrogate with the ratio of the whole sequence."""


class RLOO(PolicyGradient):
    """REINFORCE leave-one-out."""

    @takes(RLOOConfig)
    def __init__(self, settings: RLOOConfig) -> None:
        super().__init__(config=settings)
