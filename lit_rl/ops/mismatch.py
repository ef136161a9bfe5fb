"""Weights for tokens that an engine drew which is not quite the policy that learns, and how far apart the two are.

``old_logprobs (b, t)`` are the training side's for the policy that took the rollout, ``sampler_logprobs (b, t)`` the
engine's, NaN where it did not score a token; ``d`` is their difference. See :mod:`lit_rl.ops.engine`.

A correction is called as ``(old_logprobs, sampler_logprobs, mask, **own settings) -> weights (b, t)``. Weights are
detached, 0 outside the loss mask, and multiply the loss of their token. :mod:`lit_rl.ops.rejection` changes the mask.

The four corrections are two choices: the ratio ``exp(d)`` is a token's or, as ``exp(sum_t d)``, its row's; a ratio that
leaves ``[low, high]`` is cut to the bound or becomes 0.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from lit_rl.ops.engine import Mask, PerToken, engine_log_ratio, engine_ratios
from lit_rl.ops.masking import masked_mean, masked_sum
from lit_rl.ops.step import Highest, Lowest, Metrics, WeightTotals

Bound = float | None


def token_truncate(
    old_logprobs: PerToken, sampler_logprobs: PerToken, mask: Mask, *, low: Bound = None, high: Bound = 3.0
) -> PerToken:
    """``clamp(exp(d), low, high)`` for each token: truncated importance sampling.

    Args:
        low: Lowest weight, at least 0. None: no bound.
        high: Highest weight. None: no bound.

    Raises:
        ValueError: both bounds are None, or low is not below high.
    """
    return _clamped(engine_ratios(old_logprobs, sampler_logprobs, mask)[0], mask, low, high)


def token_mask(
    old_logprobs: PerToken, sampler_logprobs: PerToken, mask: Mask, *, low: Bound = None, high: Bound = 3.0
) -> PerToken:
    """``exp(d)`` for each token where it lies in ``[low, high]``, else 0 (IcePop).

    Args:
        low: A weight below it becomes 0. None: no bound.
        high: A weight above it becomes 0. None: no bound.

    Raises:
        ValueError: both bounds are None, or low is not below high.
    """
    return _zero_outside(engine_ratios(old_logprobs, sampler_logprobs, mask)[0], mask, low, high)


def sequence_truncate(
    old_logprobs: PerToken, sampler_logprobs: PerToken, mask: Mask, *, low: Bound = None, high: Bound = 3.0
) -> PerToken:
    """``clamp(exp(sum_t d), low, high)`` for each row, at all its tokens.

    Args:
        low: Lowest weight, at least 0. None: no bound.
        high: Highest weight. None: no bound.

    Raises:
        ValueError: both bounds are None, or low is not below high.
    """
    return _clamped(engine_ratios(old_logprobs, sampler_logprobs, mask)[1], mask, low, high)


def sequence_mask(
    old_logprobs: PerToken, sampler_logprobs: PerToken, mask: Mask, *, low: Bound = None, high: Bound = 3.0
) -> PerToken:
    """``exp(sum_t d)`` for each row, at all its tokens, where it lies in ``[low, high]``, else 0: TRL's default.

    Args:
        low: A weight below it becomes 0. None: no bound.
        high: A weight above it becomes 0. None: no bound.

    Raises:
        ValueError: both bounds are None, or low is not below high.
    """
    return _zero_outside(engine_ratios(old_logprobs, sampler_logprobs, mask)[1], mask, low, high)


def normalize_token_weights(weights: Float[Tensor, "b t"], totals: WeightTotals) -> Float[Tensor, "b t"]:
    """``weights / mean``, the mean being over the loss tokens of the step: self-normalised importance sampling.

    A step whose weights are all 0 keeps them.
    """
    return _over_mean(weights, totals.token_weights, totals.tokens)


def normalize_sequence_weights(weights: Float[Tensor, "b t"], totals: WeightTotals) -> Float[Tensor, "b t"]:
    """``weights / mean``, every row of the step that has a loss token counting the same, whatever its length.

    A step whose weights are all 0 keeps them.
    """
    return _over_mean(weights, totals.sequence_weights, totals.sequences)


def effective_share(moments: Float64[Tensor, "3"]) -> Float64[Tensor, ""]:
    """``(sum w)^2 / (n sum w^2)``: the effective share of a sample under weights, 1 at best (all equal).

    0 where every weight is 0, NaN where there is none.

    Args:
        moments: :func:`~lit_rl.ops.masking.masked_moments` of the weights, added up over micro-batches and ranks.
    """
    count, total, squares = moments.unbind()
    return total.square() / (count * squares.clamp(min=torch.finfo(squares.dtype).tiny))


@torch.no_grad()
def mismatch_metrics(
    old_logprobs: Float[Tensor, "b t"],
    sampler_logprobs: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    weights: Float[Tensor, "b t"] | None = None,
    keep: Bool[Tensor, "b t"] | None = None,
) -> Metrics:
    """Return metrics of the distance between engine and policy, and of its correction. TRL's names where TRL has the
    metric.

    Over the loss tokens that the engine scored:

        sampling/sampling_logp_difference/{mean,max}    |d|, in nats
        sampling/kl, sampling/k3, sampling/chi2         means of -d, of exp(d) - 1 - d, and of exp(2 d) - 1
        sampling/ppl_ratio                              perplexity of the policy / of the engine, a mean over rows

    With `weights`, over all loss tokens (TRL counts a sequence weight once a row, here it counts once a token):

        sampling/importance_sampling_ratio/{min,mean,max}
        sampling/truncated      share of weights that a bound has changed, but not to 0
        sampling/masked         share of weights that are 0

    With `keep`: sampling/rejected, the share of loss tokens that a rejection took out.

    :func:`effective_share` is not among them: it is no mean, so it is formed of the sums over all ranks.

    Args:
        old_logprobs: Of the training side.
        sampler_logprobs: Of the engine; NaN: not scored.
        mask: Loss mask, before rejection.
        weights: From a correction, before normalisation. None: nothing is corrected.
        keep: From a rejection. None: nothing is rejected.
    """
    scored = mask & ~(old_logprobs - sampler_logprobs).isnan()
    difference = (old_logprobs - sampler_logprobs).float().abs()
    metrics: Metrics = {
        "sampling/sampling_logp_difference/mean": (masked_sum(difference, scored), scored.sum().float()),
        "sampling/sampling_logp_difference/max": Highest(difference.masked_fill(~scored, -torch.inf).amax()),
    }
    log_ratio = engine_log_ratio(old_logprobs, sampler_logprobs, scored)
    per_token = {
        "sampling/kl": -log_ratio,
        "sampling/k3": torch.expm1(log_ratio) - log_ratio,
        "sampling/chi2": torch.expm1(2 * log_ratio),
    }
    metrics |= {name: (masked_sum(value, scored), scored.sum().float()) for name, value in per_token.items()}
    rows = scored.any(1)
    ppl_ratio = (-masked_mean(log_ratio, scored, dim=1)).exp()
    metrics["sampling/ppl_ratio"] = (masked_sum(ppl_ratio, rows), rows.sum().float())
    if weights is not None:
        metrics |= _weight_metrics(old_logprobs, sampler_logprobs, mask, weights)
    if keep is not None:
        metrics["sampling/rejected"] = ((mask & ~keep).sum().float(), mask.sum().float())
    return metrics


def _weight_metrics(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, weights: Tensor) -> Metrics:
    count = mask.sum().float()
    # A weight that no bound changed is the ratio of its token or of its row, to the last bit.
    of_token, of_row = engine_ratios(old_logprobs, sampler_logprobs, mask)
    changed = weights.ne(of_token) & weights.ne(of_row)
    zero = weights == 0
    return {
        "sampling/importance_sampling_ratio/mean": (masked_sum(weights, mask), count),
        "sampling/importance_sampling_ratio/min": Lowest(weights.masked_fill(~mask, torch.inf).amin()),
        "sampling/importance_sampling_ratio/max": Highest(weights.masked_fill(~mask, -torch.inf).amax()),
        "sampling/masked": ((mask & zero).sum().float(), count),
        "sampling/truncated": ((mask & changed & ~zero).sum().float(), count),
    }


def _clamped(ratio: Tensor, mask: Tensor, low: Bound, high: Bound) -> Tensor:
    _check_bounds(low, high)
    return ratio.clamp(low, high).masked_fill(~mask, 0.0)


def _zero_outside(ratio: Tensor, mask: Tensor, low: Bound, high: Bound) -> Tensor:
    _check_bounds(low, high)
    outside = ~mask
    if low is not None:
        outside |= ratio < low
    if high is not None:
        outside |= ratio > high
    return ratio.masked_fill(outside, 0.0)


def _over_mean(weights: Tensor, total: Tensor, count: Tensor) -> Tensor:
    return torch.where(total > 0, weights * count / total.clamp(min=torch.finfo(weights.dtype).tiny), weights)


def _check_bounds(low: Bound, high: Bound) -> None:
    if low is None and high is None:
        raise ValueError("low=None high=None bounds no weight: give one of them, or .inf for weights without a bound.")
    lowest, highest = 0.0 if low is None else low, float("inf") if high is None else high
    if not (0 <= lowest < highest):
        raise ValueError(f"low={low} high={high}: a ratio is never below 0, and low has to be below high.")
