"""GRPO: group-relative policy optimisation, arXiv:2402.03300 (DeepSeekMath), equation 3, in TRL 1.16's vetted setting.

For G completions of one prompt, each with a reward:

    advantage   A_i = (R_i - mean(R)) / (std(R) + 1e-4)
    ratio       r_it = exp(logprobs_it - old_logprobs_it)
    objective   - min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i) + beta KL_it, averaged over tokens

Which advantage, loss, KL estimator and average is a choice of functions (`algo/advantage`, `algo/loss`, `algo/kl`,
`algo/reduction`): DAPO, Dr. GRPO, GSPO, CISPO and the like are such choices, files in `conf/algo`, not classes. Every
further term, off by default, stands in `lit_rl.algorithms.families.policy_gradient`.
"""

from __future__ import annotations

from typing import final

from lit_rl.algorithms.families.policy_gradient import PolicyGradient


@final
class GRPO(PolicyGradient):
    """Group-relative policy optimisation: the defaults of every term are `PolicyGradient`'s."""
