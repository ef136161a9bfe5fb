"""Losses that stop a gradient where the ratio, the log ratio or the log-prob has left its range."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.ops.losses.common import Advantages, Ratio, Terms, beyond, clip_metrics
from lit_rl.ops.masking import masked_mean
from lit_rl.ops.ranges import Above, AboveOne, Positive, Share
from lit_rl.ops.ratios import token_ratio
from lit_rl.ops.step import Metrics


def _upper_bound(clip_low: float, clip_high: float | None) -> float:
    """Return the upper bound of the clip on the ratio."""
    return 1 + (clip_low if clip_high is None else clip_high)


AboveUpperBound = Annotated[float, Above(_upper_bound)]
"""A bound on the ratio that leaves the clip as it is."""


def clipped_policy_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    clip_low: Share = 0.2,
    clip_high: Positive | None = None,
    delta: AboveUpperBound | None = None,
    ratio: Ratio = token_ratio,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """PPO's clipped surrogate (1707.06347, eq. 7): ``-min(min(r, delta) A, clip(r, 1 - clip_low, 1 + clip_high) A)``.

    With the ratio of tokens it is the loss of GRPO, Dr. GRPO and DAPO; of sequence means that of GSPO (2507.18071,
    eq. 5) and, reduced by ``sequence_total``, of LUSPO (2602.05261); of sequence sums that of RLOO in TRL.
    ``delta`` is the dual clip (1912.09729) under INTELLECT-2's name (2505.07291): where the advantage is negative, the
    loss stops at ``delta |A|``.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        clip_low: Distance of the lower bound from 1, in [0, 1].
        clip_high: Distance of the upper bound from 1, above 0. None: ``clip_low``. DAPO (2503.14476): 0.28.
        delta: Bound on the ratio where the advantage is negative, and the plain clip has none. Above ``1 + clip_high``;
            verl's dual clip takes 3. None: no bound.
        ratio: Level of the ratio: a function of ``lit_rl.ops.ratios``.
    """
    clip_high = clip_low if clip_high is None else clip_high
    terms = Terms.of(logprobs, old_logprobs, advantages, mask, ratio)
    clipped = terms.ratio.clamp(1 - clip_low, 1 + clip_high)
    capped = terms.ratio if delta is None else terms.ratio.clamp(max=delta)
    loss = -torch.minimum(capped * terms.advantages, clipped * terms.advantages)
    # TRL counts clips of the capped ratio, which is the same count for every delta above 1 + clip_high.
    metrics = clip_metrics(terms, *beyond(terms.ratio, terms, 1 - clip_low, 1 + clip_high))
    if delta is not None:
        metrics["clip_ratio/delta_mean"] = _delta_share(terms, delta)
    return terms.only(loss), metrics


def up_grpo_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    clip_low: Share = 0.2,
    delta: AboveOne | None = 3.0,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """UP-GRPO (2607.06987, eq. 14): an unbounded positive side, the clipped surrogate on the negative one.

    ``-A exp(lp - sg(lp))`` where ``A > 0``: value -A and the gradient of REINFORCE, whatever the ratio.
    ``-max(min(r, delta), 1 - clip_low) A`` elsewhere, which is the dual clip: its upper bound acts on no bad token.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        clip_low: Distance of the lower bound from 1, in [0, 1].
        delta: Bound on the ratio where the advantage is negative (dual clip, 1912.09729), above 1. None: no bound.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    anchored = (terms.logprobs - terms.logprobs.detach()).exp()
    capped = terms.ratio if delta is None else terms.ratio.clamp(max=delta)
    loss = -torch.where(terms.advantages > 0, anchored, capped.clamp(min=1 - clip_low)) * terms.advantages
    metrics = clip_metrics(terms, *beyond(terms.ratio, terms, 1 - clip_low, math.inf))
    if delta is not None:
        metrics["clip_ratio/delta_mean"] = _delta_share(terms, delta)
    return terms.only(loss), metrics


def gmpo_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    clip_low: Positive = 0.4,
    clip_high: Positive | None = None,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """GMPO (2507.20673): the geometric mean of the token ratios of a row, each clipped in log space first.

    ``-A exp(sum_t m w' / n_i)`` at every token of row i, with ``w = log r`` of the token and ``w' = min(w, clip_high)``
    where ``A > 0``, else ``max(w, -clip_low)``. Reduce it with ``sequence_mean``, the average over rows of the paper.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        clip_low: How far the log ratio may fall, above 0: the bound on the ratio is ``exp(-clip_low)``.
        clip_high: How far the log ratio may rise, above 0. None: ``clip_low``.
    """
    clip_high = clip_low if clip_high is None else clip_high
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    w = terms.log_ratio
    one_sided = torch.where(terms.advantages > 0, w.clamp(max=clip_high), w.clamp(min=-clip_low))
    loss = -masked_mean(one_sided, mask, dim=1).exp().unsqueeze(1) * terms.advantages
    return terms.only(loss), clip_metrics(terms, *beyond(w, terms, -clip_low, clip_high))


def cpgd_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    clip_low: Share = 0.2,
    clip_high: Positive | None = None,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """The policy-gradient term of CPGD (2505.12504): REINFORCE with the log-prob clipped, so no ratio in the gradient.

    ``-A min(lp, lp_old + log(1 + clip_high))`` where ``A > 0``, else ``-A max(lp, lp_old + log(1 - clip_low))``. The
    paper adds a KL term to the old policy, which is a term of its own here.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        clip_low: Distance of the lower bound on the ratio from 1, in [0, 1]. 1: no bound.
        clip_high: Distance of the upper bound from 1, above 0. None: ``clip_low``.
    """
    clip_high = clip_low if clip_high is None else clip_high
    lowest, highest = math.log1p(-clip_low) if clip_low < 1 else -math.inf, math.log1p(clip_high)
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    lp, old = terms.logprobs, terms.old_logprobs
    bounded = torch.where(terms.advantages > 0, torch.minimum(lp, old + highest), torch.maximum(lp, old + lowest))
    return terms.only(-bounded * terms.advantages), clip_metrics(terms, *beyond(lp - old, terms, lowest, highest))


@torch.no_grad()
def _delta_share(terms: Terms, delta: float) -> tuple[Tensor, Tensor]:
    return terms.share((terms.ratio > delta) & (terms.advantages < 0))
