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

from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.settings.algorithms import GRPOConfig
from lit_rl.settings.base import takes


class GRPO(PolicyGradient):
    """Group-relative policy optimisation."""

    @takes(GRPOConfig)
    def __init__(self, settings: GRPOConfig) -> None:
        super().__init__(config=settings)
