"""Changes to the rewards of rows before advantages are taken.

Called as ``(rewards (b,), group_id (b,), **columns, **own settings) -> (b,)``; a function asks for a column by naming
it: ``lengths (b,)`` of the responses in tokens, ``ended (b,)`` whether the response ended by itself. A NaN reward (not
scored) stays NaN, and its row takes no part in the statistics of its group.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rl.ops.grouped import Groups, group_max


def missing_eos(
    rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"], ended: Bool[Tensor, " b"], *, penalty: float = 1.0
) -> Float[Tensor, " b"]:
    """``r - penalty`` where the response did not end by itself: `missing_eos_penalty` of TRL's PPO.

    Args:
        rewards: NaN: not scored.
        group_id: Not used.
        ended: Whether the response ended before the limit of tokens.
        penalty: In the unit of the rewards; above 0.

    Raises:
        ValueError: the penalty is not above 0.
    """
    if not penalty > 0:
        raise ValueError(f"penalty={penalty} is subtracted where the response did not end; it has to be above 0.")
    return torch.where(ended, rewards, rewards - penalty)


def relative_length_penalty(
    rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"], lengths: Int[Tensor, " b"], *, weight: float = 0.25
) -> Float[Tensor, " b"]:
    """``r - weight mean_group(r) length / longest of the group``: longer is worse, more so where the task is easy.

    The length part of prime-rl's reward. With rewards of 0 and 1 the mean is the share solved: a task that no
    completion solves has no penalty.

    Args:
        rewards: NaN: not scored.
        group_id: Of each row.
        lengths: In tokens.
        weight: Largest penalty in units of the group's mean reward; at least 0.

    Raises:
        ValueError: the weight is below 0.
    """
    _check_weight(weight)
    groups = Groups.of(rewards, group_id)
    share = lengths.double() / _longest(lengths, groups).clamp(min=1.0)
    return (rewards.double() - weight * groups.mean * share).to(rewards.dtype)


def relative_length_reward(
    rewards: Float[Tensor, " b"],
    group_id: Int[Tensor, " b"],
    lengths: Int[Tensor, " b"],
    *,
    weight: float = 1.0,
    threshold: float = 0.5,
) -> Float[Tensor, " b"]:
    """``r + weight s`` with ``s = 1/2 - (length - shortest) / (longest - shortest)``: Kimi k1.5 (2501.12599, 2.3.3).

    Right answers get ``s``, from 1/2 for the shortest of the group to -1/2 for the longest; wrong ones get
    ``min(0, s)``, so that a short wrong answer gains nothing. 0 where all have the same length.

    Args:
        rewards: NaN: not scored.
        group_id: Of each row.
        lengths: In tokens.
        weight: At least 0.
        threshold: A reward above it is a right answer.

    Raises:
        ValueError: the weight is below 0.
    """
    _check_weight(weight)
    groups = Groups.of(rewards, group_id)
    longest, shortest = _longest(lengths, groups), -_longest(-lengths, groups)
    spread = longest - shortest
    score = (0.5 - (lengths.double() - shortest) / spread.clamp(min=1.0)).masked_fill(spread == 0, 0.0)
    score = torch.where(rewards > threshold, score, score.clamp(max=0.0))
    return (rewards.double() + weight * score).to(rewards.dtype)


def _longest(lengths: Tensor, groups: Groups) -> Tensor:
    """Return the longest of the scored rows of each row's group; 0 where there is none, so that all is finite."""
    known = lengths.double().masked_fill(~groups.scored, -torch.inf)
    return group_max(known, groups.index).masked_fill(groups.size == 0, 0.0)


def _check_weight(weight: float) -> None:
    if not weight >= 0:
        raise ValueError(f"weight={weight} would reward length; it has to be at least 0.")
