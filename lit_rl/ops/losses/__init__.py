"""Policy-gradient losses, not yet reduced: the caller adds a KL term and chooses the denominator.

All share the signature ``loss(logprobs, old_logprobs, advantages, mask, [weights], [step], *, settings)`` and return
losses of tokens ``(b, t)``, to be minimised, 0 outside the mask, with their metrics. Advantages are one a row or one
a token. What stands outside the mask, NaN included, changes neither value nor gradient. A loss of whole rows gives
every token the value of its row, so that :func:`~lit_rl.ops.reductions.sequence_mean` is the mean over rows.

Notation: ``r`` the importance ratio of :mod:`lit_rl.ops.ratios`, of tokens where a loss has no ``ratio`` setting,
``lp`` and ``lp_old`` log-probs, ``p`` and ``p_old`` probabilities, ``A`` the advantage, ``sg`` without gradient.

Two families differ in what a ratio beyond its bound does. Clipped, masked and soft losses (``clipped_policy_loss``,
``gmpo_loss``, ``dppo_*``, ``sapo_loss``, ...) stop its gradient; weighted ones (``cispo_*``, ``vespo_loss``) bound the
weight of the token and never drop it.

Metrics are pairs ``(numerator, denominator)`` over loss tokens, or extremes over rows (:mod:`lit_rl.ops.step`). Shares
count tokens also where the ratio is the row's. Losses without a bound have the last two only:

    clip_ratio/low_mean     share beyond the lower bound with a negative advantage: no gradient there
    clip_ratio/low_min      the same share of one row: the lowest of all rows
    clip_ratio/high_mean    share beyond the upper bound with a positive advantage: no gradient there
    clip_ratio/high_max     the same share of one row: the highest of all rows
    clip_ratio/region_mean  beyond either of them
    ratio_mean              mean ratio of the policy to the one that drew the tokens; 1 on policy
    approx_kl               mean of ``ratio - 1 - log ratio``: KL(old policy || policy)

Some have one of their own:

    clip_ratio/delta_mean   share that ``delta`` stops: ratio above it, negative advantage
    cispo_clip_ratio        share whose weight is cut; one-sided CISPO counts positive advantages only, as TRL does
    vespo/phi_seq_mean      mean over rows of the weight phi
    clip_cov/share          share of tokens dropped for their covariance
    kl_cov/share            share of tokens with the KL penalty
"""

from lit_rl.ops.losses.clipped import clipped_policy_loss, cpgd_loss, gmpo_loss, up_grpo_loss
from lit_rl.ops.losses.common import MAX_LOG_RATIO
from lit_rl.ops.losses.covariance import clip_cov_loss, kl_cov_loss
from lit_rl.ops.losses.divergence import dppo_kl_loss, dppo_tv_loss, prime_rl_ipo_loss, prime_rl_loss
from lit_rl.ops.losses.soft import sapo_loss, vespo_loss
from lit_rl.ops.losses.weighted import cispo_loss, cispo_two_sided_loss, importance_weighted_loss, reinforce_loss

__all__ = [
    "MAX_LOG_RATIO",
    "cispo_loss",
    "cispo_two_sided_loss",
    "clip_cov_loss",
    "clipped_policy_loss",
    "cpgd_loss",
    "dppo_kl_loss",
    "dppo_tv_loss",
    "gmpo_loss",
    "importance_weighted_loss",
    "kl_cov_loss",
    "prime_rl_ipo_loss",
    "prime_rl_loss",
    "reinforce_loss",
    "sapo_loss",
    "up_grpo_loss",
    "vespo_loss",
]
