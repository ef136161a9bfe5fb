"""Statistics of groups of rows. Rows are told apart by the id of their group, never by their position.

A NaN marks a row that takes no part in any statistic. All is computed in float64 on differences from the group's lowest
value, so groups of equal values have a spread of exactly 0, never rounding noise blown up by a small denominator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int, Shaped
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Groups:
    """Statistics of each row's group."""

    index: Int[Tensor, " b"]
    """The group's id, renumbered 0, 1, ..."""
    scored: Bool[Tensor, " b"]
    """The value is a number."""
    size: Int[Tensor, " b"]
    """Scored rows of the group."""
    mean: Float64[Tensor, " b"]
    """Mean of the group's scored rows; 0 in a group without any."""
    deviation: Float64[Tensor, " b"]
    """Distance from the mean; 0 where not scored."""

    @classmethod
    def of(cls, values: Float[Tensor, " b"], group_id: Int[Tensor, " b"]) -> Groups:
        index = renumbered(group_id)
        scored = ~values.isnan()
        known = values.double().masked_fill(~scored, torch.inf)
        lowest = -group_max(-known, index)
        above = (known - lowest).masked_fill(~scored, 0.0)
        size = group_sum(scored.long(), index)
        mean_above = group_sum(above, index) / size.clamp(min=1)
        return cls(
            index=index,
            scored=scored,
            size=size,
            mean=(lowest + mean_above).masked_fill(size == 0, 0.0),
            deviation=(above - mean_above).masked_fill(~scored, 0.0),
        )

    def squares(self) -> Float64[Tensor, " b"]:
        """Return the sum of squared deviations of the group."""
        return group_sum(self.deviation.square(), self.index)

    def std(self) -> Float64[Tensor, " b"]:
        """Return the standard deviation of the group with ``n - 1`` in the denominator; 0 in groups of one row."""
        return (self.squares() / (self.size - 1).clamp(min=1)).sqrt()


def renumbered(ids: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """Return the ids renumbered to 0, 1, ... in their order; ``torch.unique`` waits for a device to count them."""
    ordered, order = ids.sort(stable=True)
    steps = F.pad((ordered[1:] != ordered[:-1]).long(), (1, 0))[: len(ids)]
    return torch.empty_like(order).scatter_(0, order, steps.cumsum(0))


def group_sum(values: Shaped[Tensor, " b"], index: Int[Tensor, " b"]) -> Shaped[Tensor, " b"]:
    """Return each row's group total. There are at most b groups, so the totals fit a tensor of the rows' shape."""
    return torch.zeros_like(values).index_add(0, index, values)[index]


def group_max(values: Float[Tensor, " b"], index: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return each row's group maximum."""
    return torch.full_like(values, -torch.inf).scatter_reduce(0, index, values, "amax")[index]


def divide(deviation: Float[Tensor, " b"], std: Float[Tensor, " b"], eps: float) -> Float[Tensor, " b"]:
    """``deviation / (std + eps)``; 0 where there is no spread, even if ``eps`` is 0."""
    return deviation / (std + eps).masked_fill(std == 0, 1.0)
