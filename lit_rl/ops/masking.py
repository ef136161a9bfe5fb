"""Sums and means over the True entries of a mask.

What stands under a False entry never counts, be it NaN or infinite, neither in the value nor in the gradient: it is
replaced before the sum, not multiplied by zero after it.
"""

from jaxtyping import Bool, Float
from torch import Tensor


def masked_sum(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Sum of the selected entries over ``dim``, or of all. An empty selection gives 0, attached to the graph."""
    selected = x.masked_fill(~mask, 0.0)
    return selected.sum() if dim is None else selected.sum(dim)


def masked_mean(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Mean of the selected entries over ``dim``, or of all. An empty selection gives 0, attached to the graph."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)
