"""Corrections for tokens drawn by an engine that is not quite the policy: weights, rejections, and metrics of the gap.

``old_logprobs (b, t)`` are the training side's for the policy that took the rollout, ``sampler_logprobs (b, t)`` the
engine's, NaN where it did not score a token. ``d = old_logprobs - sampler_logprobs`` is 0 for a token that was not
scored, so its ratio ``exp(d)`` is 1. The ratio of a row is the product over its loss tokens, as TRL has it, not their
geometric mean.

A correction is called as ``(old_logprobs, sampler_logprobs, mask, **own settings) -> weights (b, t)``. Weights are
detached, 0 outside the loss mask, and multiply the loss of their token. The four corrections are two choices: the
ratio is a token's or, as ``exp(sum_t d)``, its row's; a ratio that leaves ``[low, high]`` is cut to the bound or
becomes 0.

A rejection is called alike and returns ``bool (b, t)``: the tokens of the mask that are kept. Its statistic makes a
distance of d, within +-20, at each token. Bounds are in the distance's own unit: nats, and nats per token for a mean.
k1, k2 and k3 estimate KL(engine || policy), tv the total variation between both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from lit_rl.ops.policy_losses import MAX_LOG_RATIO
from lit_rl.ops.reductions import Highest, Lowest, Metrics, WeightTotals, masked_mean, masked_sum
from lit_rl.ops.traits import CorrectionTraits, StatisticTraits, traits_of

__all__ = [
    "auto_correction",
    "effective_share",
    "k1_statistic",
    "k2_statistic",
    "k3_statistic",
    "mismatch_metrics",
    "normalize_sequence_weights",
    "normalize_token_weights",
    "reject_outside_trust_region",
    "reject_sequences_by_max",
    "reject_sequences_by_mean",
    "reject_sequences_by_sum",
    "reject_tokens",
    "sequence_mask",
    "sequence_truncate",
    "token_mask",
    "token_truncate",
    "tv_statistic",
]


PerToken = Float[Tensor, "b t"]
Mask = Bool[Tensor, "b t"]
Bound = float | None


def engine_log_ratio(
    old_logprobs: Float[Tensor, "b t"], sampler_logprobs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """Return d, detached, in float32, within +-20; 0 outside the mask and on tokens that the engine did not score."""
    return _difference(old_logprobs, sampler_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def engine_ratios(
    old_logprobs: Float[Tensor, "b t"], sampler_logprobs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """``exp(d)`` of each token and ``exp(sum_t d)`` of its row, neither bounded by a setting."""
    difference = _difference(old_logprobs, sampler_logprobs, mask)
    rows = difference.sum(1, keepdim=True).expand(mask.shape)
    return _exp(difference), _exp(rows)


def _difference(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    difference = (old_logprobs - sampler_logprobs).detach().float()
    # One token that one side finds impossible decides the row's sum, and must not make it NaN.
    return difference.masked_fill(~mask, 0.0).nan_to_num(nan=0.0, posinf=1e6, neginf=-1e6)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@CorrectionTraits(of_rows=False)
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


@CorrectionTraits(of_rows=False)
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


@CorrectionTraits(of_rows=True)
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


@CorrectionTraits(of_rows=True)
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
        moments: :func:`~lit_rl.ops.reductions.masked_moments` of the weights, added up over micro-batches and ranks.
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


@CorrectionTraits(of_rows=False)
def auto_correction(
    old_logprobs: Float[Tensor, "b t"], sampler_logprobs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """Apply :func:`token_truncate` with its own bounds: truncated importance sampling.

    With this setting an algorithm takes no correction where the generator draws by the policy's own forward pass
    (`lit_rl.algorithms.terms.token_weights`): all weights are 1 there, but for roundings.

    By tokens, where TRL masks whole responses: the ratio of a response is a product, so it leaves any bounds as
    responses grow, and with it the longest ones would leave the loss. A token's does not depend on the length.

    Args:
        old_logprobs: Of the training side.
        sampler_logprobs: Of the engine.
        mask: Loss mask.
    """
    return token_truncate(old_logprobs, sampler_logprobs, mask)


Statistic = Callable[[Tensor], Tensor]
"""A function from d to a distance, token by token."""


@StatisticTraits(signed=True)
def k1_statistic(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``-d``: of either sign, so it has two bounds. ``-log(high) <= d <= -log(low)`` in ratios."""
    return -log_ratio


@StatisticTraits(signed=False)
def k2_statistic(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``d^2 / 2``: the same on both sides."""
    return 0.5 * log_ratio.square()


@StatisticTraits(signed=False)
def k3_statistic(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``exp(d) - 1 - d``: harder on tokens that the engine finds too unlikely."""
    return torch.expm1(log_ratio) - log_ratio


@StatisticTraits(signed=False)
def tv_statistic(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``|exp(d) - 1| / 2``: its mean over the engine's tokens is the total variation between engine and policy, in
    [0, 1]: the share of the probability that lies elsewhere. No unit, where the others are in nats."""
    return 0.5 * torch.expm1(log_ratio).abs()


def reject_tokens(
    old_logprobs: PerToken,
    sampler_logprobs: PerToken,
    mask: Mask,
    *,
    statistic: Statistic,
    high: float,
    low: Bound = None,
) -> Mask:
    """Return the tokens whose statistic lies within the bounds.

    Args:
        statistic: `d -> distance` of each token.
        high: Highest distance that is kept, in nats.
        low: Lowest distance that is kept, for a statistic of either sign only.

    Raises:
        ValueError: the bounds do not fit the statistic.
    """
    distance = _distance(old_logprobs, sampler_logprobs, mask, statistic, low, high)
    return mask & _within(distance, low, high)


def reject_sequences_by_sum(
    old_logprobs: PerToken,
    sampler_logprobs: PerToken,
    mask: Mask,
    *,
    statistic: Statistic,
    high: float,
    low: Bound = None,
) -> Mask:
    """Keep the rows for which the statistic, summed over the loss tokens, lies within the bounds.

    Args:
        statistic: `d -> distance` of each token.
        high: Highest sum that is kept, in nats.
        low: Lowest sum that is kept, for a statistic of either sign only.

    Raises:
        ValueError: the bounds do not fit the statistic.
    """
    distance = _distance(old_logprobs, sampler_logprobs, mask, statistic, low, high)
    return mask & _within(masked_sum(distance, mask, dim=1), low, high).unsqueeze(1)


def reject_sequences_by_mean(
    old_logprobs: PerToken,
    sampler_logprobs: PerToken,
    mask: Mask,
    *,
    statistic: Statistic,
    high: float,
    low: Bound = None,
) -> Mask:
    """Keep the rows for which the mean of the statistic over the loss tokens lies within the bounds.

    Args:
        statistic: `d -> distance` of each token.
        high: Highest mean that is kept, in nats per token.
        low: Lowest mean that is kept, for a statistic of either sign only.

    Raises:
        ValueError: the bounds do not fit the statistic.
    """
    distance = _distance(old_logprobs, sampler_logprobs, mask, statistic, low, high)
    return mask & _within(masked_mean(distance, mask, dim=1), low, high).unsqueeze(1)


def reject_sequences_by_max(
    old_logprobs: PerToken, sampler_logprobs: PerToken, mask: Mask, *, statistic: Statistic, high: float
) -> Mask:
    """Keep the rows of which no loss token has a statistic above the bound: one bad token rejects its row.

    Args:
        statistic: `d -> distance` of each token, never negative.
        high: Highest distance that is kept, in nats.

    Raises:
        ValueError: the statistic is of either sign, or the bound is not above 0.
    """
    traits = traits_of(statistic, StatisticTraits)
    if traits is not None and traits.signed:
        raise ValueError(
            "the largest of a statistic of either sign says nothing about the smallest: take k2 or k3, or tv."
        )
    distance = _distance(old_logprobs, sampler_logprobs, mask, statistic, None, high)
    return mask & ~(mask & (distance > high)).any(1, keepdim=True)


def reject_outside_trust_region(
    old_logprobs: PerToken,
    sampler_logprobs: PerToken,
    mask: Mask,
    *,
    statistic: Statistic,
    high: float,
    high_mean: float,
) -> Mask:
    """Keep the rows within a trust region: no loss token's statistic above one bound, nor their mean above another.

    Trust region masking (2512.23075). The bound on the worst token is what a bound on the whole row's probability
    needs; the mean alone would let a long row hide one token that the policy finds impossible.

    Args:
        statistic: `d -> distance` of each token, never negative.
        high: Highest distance of a token, in the statistic's unit.
        high_mean: Highest mean over the row's loss tokens, at most ``high``.

    Raises:
        ValueError: the statistic is of either sign, or the bounds do not fit each other.
    """
    if not 0 < high_mean <= high:
        raise ValueError(
            f"high_mean={high_mean} high={high}: a mean is never above the largest: 0 < high_mean <= high."
        )
    by_max = reject_sequences_by_max(old_logprobs, sampler_logprobs, mask, statistic=statistic, high=high)
    return by_max & reject_sequences_by_mean(old_logprobs, sampler_logprobs, mask, statistic=statistic, high=high_mean)


def _distance(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, statistic: Statistic, low: Bound, high: float
) -> Tensor:
    """Return the distance of each token, ``(b, t)``; refuse bounds that do not fit the statistic."""
    _check_rejection(statistic, low, high)
    return statistic(engine_log_ratio(old_logprobs, sampler_logprobs, mask))


def _within(distance: Tensor, low: Bound, high: float) -> Tensor:
    return distance <= high if low is None else (distance >= low) & (distance <= high)


def _check_rejection(statistic: Statistic, low: Bound, high: float) -> None:
    traits = traits_of(statistic, StatisticTraits)
    if traits is None:
        return
    if traits.signed:
        if low is None or not low < high:
            raise ValueError(
                f"low={low} high={high}: this statistic has either sign, so it needs both bounds, low below high. "
                "For k1, ratios between 1/2 and 2 are low=-0.693 high=0.693."
            )
    elif low is not None:
        raise ValueError(
            f"low={low}: this statistic is never negative and 0 is the best, so it has an upper bound only."
        )
    elif not high > 0:
        raise ValueError(f"high={high} rejects everything: this statistic is never negative.")
