"""Which tokens to leave out because the engine that drew them is too far from the policy that learns.

A rejection is called as ``(old_logprobs (b, t), sampler_logprobs (b, t), mask (b, t), **own settings) -> bool (b, t)``:
the tokens of the mask that are kept. ``d = old_logprobs - sampler_logprobs`` is that of :mod:`lit_rl.ops.engine`: 0 for
a token that the engine did not score, within +-20.

A statistic makes a distance of d at each token. Bounds are in the distance's own unit: nats, and nats per token for a
mean. All three estimate KL(engine || policy).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rl.ops.engine import Mask, PerToken, engine_log_ratio
from lit_rl.ops.masking import masked_mean, masked_sum

Statistic = Callable[[Tensor], Tensor]
"""A function from d to a distance, token by token."""

Low = float | None


def k1_statistic(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``-d``: of either sign, so it has two bounds. ``-log(high) <= d <= -log(low)`` in ratios."""
    return -log_ratio


def k2_statistic(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``d^2 / 2``: the same on both sides."""
    return 0.5 * log_ratio.square()


def k3_statistic(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``exp(d) - 1 - d``: harder on tokens that the engine finds too unlikely."""
    return torch.expm1(log_ratio) - log_ratio


def reject_tokens(
    old_logprobs: PerToken,
    sampler_logprobs: PerToken,
    mask: Mask,
    *,
    statistic: Statistic,
    high: float,
    low: Low = None,
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
    low: Low = None,
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
    low: Low = None,
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
    if _either_sign(statistic):
        raise ValueError("the largest of a statistic of either sign says nothing about the smallest: take k2 or k3.")
    distance = _distance(old_logprobs, sampler_logprobs, mask, statistic, None, high)
    return mask & ~(mask & (distance > high)).any(1, keepdim=True)


def _distance(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, statistic: Statistic, low: Low, high: float
) -> Tensor:
    """Return the distance of each token, ``(b, t)``; refuse bounds that do not fit the statistic."""
    _check_rejection(statistic, low, high)
    return statistic(engine_log_ratio(old_logprobs, sampler_logprobs, mask))


def _within(distance: Tensor, low: Low, high: float) -> Tensor:
    return distance <= high if low is None else (distance >= low) & (distance <= high)


def _either_sign(statistic: Statistic) -> bool:
    return bool((statistic(torch.tensor([-1.0, 1.0])) < 0).any())


def _check_rejection(statistic: Statistic, low: Low, high: float) -> None:
    if _either_sign(statistic):
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
