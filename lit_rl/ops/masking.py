"""Sums and means over the True entries of a mask.

What stands under a False entry never counts, be it NaN or infinite, neither in the value nor in the gradient: it is
replaced before the sum, not multiplied by zero after it.
"""

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor


def masked_sum(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Sum the selected entries over ``dim``, or all. An empty selection gives 0, attached to the graph."""
    selected = x.masked_fill(~mask, 0.0)
    return selected.sum() if dim is None else selected.sum(dim)


def masked_mean(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Average the selected entries over ``dim``, or all. An empty selection gives 0, attached to the graph."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


@torch.no_grad()
def masked_moments(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float64[Tensor, "3"]:
    """Return number, sum and sum of squares of the selected entries: add these up over micro-batches and ranks.

    What is no mean (a variance, an effective share) is formed of the sums of the whole, never averaged over parts.
    """
    selected = x.double().masked_fill(~mask, 0.0)
    return torch.stack([mask.sum().double(), selected.sum(), selected.square().sum()])


def variance(moments: Float64[Tensor, "3"]) -> Float64[Tensor, ""]:
    """Return the mean squared distance from the mean, from :func:`masked_moments`; NaN of nothing."""
    count, total, squares = moments.unbind()
    return (squares / count - (total / count).square()).clamp(min=0)
