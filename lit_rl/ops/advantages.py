"""Rewards to advantages. All estimators share ``(rewards, group_id, **own settings) -> advantages``, each ``(b,)``.

- Statistics go by ``group_id`` (any integers, rows in any order), never by position.
- A NaN reward marks a row that could not be scored: it is left out of all statistics and its advantage is 0. Infinite
  rewards have no advantage; refuse them before.
- A group with fewer than two scored rows says nothing about its rows: they get 0.
- Standard deviations divide by ``n - 1``. All is computed in float64 on differences from the group's lowest reward, so
  groups of equal rewards give exactly 0, never rounding noise blown up by a small denominator.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor


def group_normalized(
    rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"], *, eps: float = 1e-4
) -> Float[Tensor, " b"]:
    """``(r - mean_group) / (std_group + eps)``: GRPO (2402.03300, section 4.1.2)."""
    groups = _group(rewards, group_id)
    return _divide(groups.deviation, groups.std(), eps).to(rewards.dtype)


def batch_normalized(
    rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"], *, eps: float = 1e-4
) -> Float[Tensor, " b"]:
    """``(r - mean_group) / (std_batch + eps)``, the deviation being over all scored rows: Lite PPO (2508.08221).

    The batch is the rows given: pass those of every rank.
    """
    batch = _group(rewards, torch.zeros_like(group_id))
    return _divide(_group(rewards, group_id).deviation, batch.std(), eps).to(rewards.dtype)


def centered(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """``r - mean_group``: Dr. GRPO (2503.20783), which divides by no deviation."""
    return _group(rewards, group_id).deviation.to(rewards.dtype)


def leave_one_out(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """``r - mean of the group's other rows``: RLOO (2402.14740). Equals ``n / (n - 1)`` times :func:`centered`."""
    groups = _group(rewards, group_id)
    return (groups.deviation * groups.size / (groups.size - 1).clamp(min=1)).to(rewards.dtype)


def group_std(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Standard deviation of each row's group, for ``frac_reward_zero_std``; 0 on NaN rows and in groups of one row."""
    groups = _group(rewards, group_id)
    return groups.std().masked_fill(~groups.scored, 0.0).to(rewards.dtype)


@dataclass(frozen=True)
class _Groups:
    """What each row has to know of its group."""

    index: Int[Tensor, " b"]
    """The group's id, renumbered 0, 1, ..."""
    scored: Bool[Tensor, " b"]
    """The reward is a number."""
    size: Int[Tensor, " b"]
    """Scored rows of the group."""
    deviation: Float64[Tensor, " b"]
    """Distance from the mean of the group's scored rows; 0 where not scored."""

    def std(self) -> Float64[Tensor, " b"]:
        return (_group_sum(self.deviation.square(), self.index) / (self.size - 1).clamp(min=1)).sqrt()


def _group(rewards: Tensor, group_id: Tensor) -> _Groups:
    index = torch.unique(group_id, return_inverse=True)[1]
    scored = ~rewards.isnan()
    values = rewards.double().masked_fill(~scored, torch.inf)
    lowest = torch.full_like(values, torch.inf).scatter_reduce(0, index, values, "amin")[index]
    above = (values - lowest).masked_fill(~scored, 0.0)
    size = _group_sum(scored.long(), index)
    deviation = (above - _group_sum(above, index) / size.clamp(min=1)).masked_fill(~scored, 0.0)
    return _Groups(index=index, scored=scored, size=size, deviation=deviation)


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    """Each row's group total, ``(b,)``. There are at most b groups, so the totals fit a tensor of the rows' shape."""
    return torch.zeros_like(values).index_add(0, index, values)[index]


def _divide(deviation: Tensor, std: Tensor, eps: float) -> Tensor:
    """``deviation / (std + eps)``; 0 where there is no spread, even if ``eps`` is 0."""
    return deviation / (std + eps).masked_fill(std == 0, 1.0)
