"""REINFORCE and its variants: one completion a prompt is enough, because nothing is compared within a group.

    token rewards  r_it = R_i at the last token - reward_beta (old_logprobs_it - ref_logprobs_it)
    advantage      A_it = whiten(sum_{s >= t} r_is)                  REINFORCE++, arXiv:2501.03262, the default
    objective      - min(r_it A_it, clip(r_it, 1 - clip_low, 1 + clip_high) A_it), averaged over tokens

`algo=reinforce` is the plain estimator (Williams, 1992): the reward itself as advantage, and no clip; `algo=remax`
takes the reward of the greedy completion as baseline (2310.10505). All further terms, off by default, are in
`lit_rl.algorithms.families.policy_gradient`.
"""

from __future__ import annotations

from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.settings.algorithms import ReinforceConfig
from lit_rl.settings.base import takes


class Reinforce(PolicyGradient):
    """REINFORCE++ by default; REINFORCE, ReMax and the like with their advantage and loss."""

    @takes(ReinforceConfig)
    def __init__(self, settings: ReinforceConfig) -> None:
        super().__init__(config=settings)
