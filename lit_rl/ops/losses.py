"""Clipped policy-gradient losses, not yet reduced: the caller adds a KL term and chooses the denominator.

Both return their metrics as pairs ``(numerator, denominator)``, see :mod:`lit_rl.ops`:

    clip_ratio/low_mean     share with ratio below the clip range and a negative advantage: no gradient there
    clip_ratio/high_mean    share with ratio above it and a positive advantage: no gradient there
    clip_ratio/region_mean  either of them
    ratio_mean              mean ratio of the policy to the one that drew the tokens; 1 on policy
    approx_kl               mean of ``ratio - 1 - log ratio``: KL(old policy || policy)
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.ops.masking import masked_sum

Metrics = dict[str, tuple[Tensor, Tensor]]

MAX_LOG_RATIO = 20.0
"""Ratios are cut at e^20, with no gradient beyond: float32 overflows at e^88, and inf * 0 would be NaN in backward."""


def clipped_policy_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Float[Tensor, " b"],
    mask: Bool[Tensor, "b t"],
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    delta: float | None = None,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """PPO's clipped surrogate for each token (1707.06347, eq. 7), to be minimised; 0 outside the mask.

    ``-min(min(r, delta) A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(logprobs - old_logprobs)``.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row; all its tokens share it.
        mask: Loss mask. What stands outside it, NaN included, changes nothing.
        clip_low: Distance of the lower bound from 1, in [0, 1].
        clip_high: Distance of the upper bound from 1, at least 0. None: ``clip_low``. DAPO (2503.14476): 0.28.
        delta: Bound on the ratio where the advantage is negative, and the plain clip has none (INTELLECT-2,
            2505.07291). Above ``1 + clip_high``. None: no bound.

    Returns:
        Losses of tokens, and metrics averaged over the tokens of the mask.
    """
    clip_high = clip_low if clip_high is None else clip_high
    log_ratio = (logprobs.float() - old_logprobs.float()).masked_fill(~mask, 0.0).clamp(max=MAX_LOG_RATIO)
    advantages = advantages.unsqueeze(1).expand_as(mask)
    loss = _surrogate(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, delta=delta)
    metrics = _clip_metrics(log_ratio, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    return loss.masked_fill(~mask, 0.0), metrics


def sequence_clipped_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Float[Tensor, " b"],
    mask: Bool[Tensor, "b t"],
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
) -> tuple[Float[Tensor, " b"], Metrics]:
    """PPO's clipped surrogate for each row, with the ratio of the whole response; 0 for a row without a loss token.

    ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(sum_t mask (logprobs - old_logprobs))``. The
    exponent is the sum, not the mean of GSPO. On policy the gradient is that of RLOO (2402.14740), which has no ratio.
    Reduce it with ``sequence_mean(per_row[:, None], mask.any(1, keepdim=True), totals)``.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row.
        mask: Loss mask. What stands outside it, NaN included, changes nothing.
        clip_low: Distance of the lower bound from 1, in [0, 1].
        clip_high: Distance of the upper bound from 1, at least 0. None: ``clip_low``.

    Returns:
        Losses of rows, and metrics averaged over the rows that have a loss token.
    """
    clip_high = clip_low if clip_high is None else clip_high
    log_ratio = masked_sum(logprobs.float() - old_logprobs.float(), mask, dim=1).clamp(max=MAX_LOG_RATIO)
    rows = mask.any(1)
    loss = _surrogate(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, delta=None)
    metrics = _clip_metrics(log_ratio, advantages, rows, clip_low=clip_low, clip_high=clip_high)
    return loss.masked_fill(~rows, 0.0), metrics


def _surrogate(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, delta: float | None
) -> Tensor:
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    capped = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(capped * advantages, clipped * advantages)


@torch.no_grad()
def _clip_metrics(log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float) -> Metrics:
    ratio = log_ratio.exp()
    low = (ratio < 1 - clip_low) & (advantages < 0)
    high = (ratio > 1 + clip_high) & (advantages > 0)
    values = {
        "clip_ratio/low_mean": low.float(),
        "clip_ratio/high_mean": high.float(),
        "clip_ratio/region_mean": (low | high).float(),
        "ratio_mean": ratio,
        "approx_kl": torch.expm1(log_ratio) - log_ratio,
    }
    count = mask.sum().float()
    return {name: (masked_sum(value, mask), count) for name, value in values.items()}
