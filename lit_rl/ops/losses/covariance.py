"""Losses that hold the entropy up where it is lost: at tokens that are likely and good (2505.22617).

The change of entropy in a step is minus the covariance of log-prob and advantage. A token's part of it is
``cov = (A - mean A) (lp - mean lp)``, means over the loss tokens of the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.ops.losses.common import MAX_LOG_RATIO, Advantages, Terms, beyond, clip_metrics, ratio_metrics
from lit_rl.ops.ranges import Band, ClipRange, NotNegative, Share
from lit_rl.ops.ratios import token_ratio
from lit_rl.ops.step import Metrics, StepTokens


def clip_cov_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    step: StepTokens | None = None,
    *,
    clip_range: ClipRange = (0.2, 0.2),
    share: Share = 2e-4,
    band: Band = (1.0, 5.0),
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """Clip-Cov (2505.22617): the clipped surrogate, with a few tokens of high covariance dropped at random.

    Each of the tokens with ``band[0] < cov < band[1]`` that the clip leaves is dropped with the probability at which
    ``max(1, share * tokens of the step)`` of them go. How many a step drops is therefore right on average only, but for
    every cut into micro-batches. The draw is torch's default generator, whose state checkpoints hold.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        step: Tokens of the optimizer step. None: this batch is the whole step.
        clip_range: Distances of the lower and of the upper bound on the ratio from 1.
        share: Share of the tokens of a step to drop, in (0, 1].
        band: Lowest and highest covariance of a token that may be dropped.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    step = _whole_step(terms, step)
    bounds = 1 - clip_range[0], 1 + clip_range[1]
    clipped = terms.ratio.clamp(*bounds)
    loss = -torch.minimum(terms.ratio * terms.advantages, clipped * terms.advantages)
    low, high = beyond(terms.ratio, terms, *bounds)
    cov, step_cov = _covariances(terms, step)
    step_ratio = (step.logprobs - step.old_logprobs).clamp(max=MAX_LOG_RATIO).exp()
    step_low, step_high = beyond(step_ratio, step, *bounds)
    candidates = _within(step_cov, band) & ~(step_low | step_high)
    chance = _count(share, step_cov) / candidates.sum().clamp(min=1)
    dropped = _within(cov, band) & ~(low | high) & (torch.rand_like(cov) < chance)
    metrics: Metrics = {"clip_cov/share": terms.share(dropped), **clip_metrics(terms, low, high)}
    return terms.only(loss.masked_fill(dropped, 0.0)), metrics


def kl_cov_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    step: StepTokens | None = None,
    *,
    share: Share = 2e-4,
    kl_coef: NotNegative = 1.0,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """KL-Cov (2505.22617): ``-r A``, plus ``kl_coef |lp - lp_old|`` on the tokens with the highest covariance.

    These are the top ``max(1, share * tokens of the step)``, and whatever ties with the last of them. Nothing is
    clipped.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        step: Tokens of the optimizer step. None: this batch is the whole step.
        share: Share of the tokens of a step that are penalised, in (0, 1].
        kl_coef: Weight of the penalty, at least 0. The paper takes 1; the example configs of verl take 0.1.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    cov, step_cov = _covariances(terms, _whole_step(terms, step))
    chosen = cov >= _top_threshold(step_cov, share)
    penalty = token_ratio(terms.logprobs, terms.old_logprobs, mask).abs().masked_fill(~chosen, 0.0)
    loss = -terms.ratio * terms.advantages + kl_coef * penalty
    return terms.only(loss), {"kl_cov/share": terms.share(chosen), **ratio_metrics(terms)}


def _whole_step(terms: Terms, step: StepTokens | None) -> StepTokens:
    if step is not None:
        return step
    return StepTokens.of(
        terms.mask, logprobs=terms.logprobs, old_logprobs=terms.old_logprobs, advantages=terms.advantages
    )


@torch.no_grad()
def _covariances(terms: Terms, step: StepTokens) -> tuple[Float[Tensor, "b t"], Float[Tensor, " n"]]:
    """Return covariances of the tokens of this batch, and of all tokens of the step. NaN in a step without tokens."""
    mean_advantage, mean_logprob = step.advantages.mean(), step.logprobs.mean()
    return (
        (terms.advantages - mean_advantage) * (terms.logprobs - mean_logprob),
        (step.advantages - mean_advantage) * (step.logprobs - mean_logprob),
    )


def _within(cov: Tensor, band: Sequence[float]) -> Tensor:
    return (cov > band[0]) & (cov < band[1])


def _count(share: float, values: Float[Tensor, " n"]) -> int:
    return max(1, int(share * values.numel()))


def _top_threshold(values: Float[Tensor, " n"], share: float) -> Tensor:
    """Return the middle between the last value of the top share and the next: log-probs of two passes differ by
    rounding."""
    count = _count(share, values)
    if values.numel() <= count:
        return values.new_tensor(-torch.inf)
    top = values.topk(count + 1).values
    return (top[-1] + top[-2]) / 2
