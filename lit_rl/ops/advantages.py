"""Rewards to advantages, one for each row; :mod:`lit_rl.ops.returns` has the estimators with one for each token.

An estimator is called as ``(rewards (b,), group_id (b,), **columns, **own settings)``, and asks for a column by
naming it: ``values (b, k)`` of each reward function, ``weights (b, k)`` of these functions, ``lengths (b,)`` of the
responses in tokens, ``greedy_rewards (b,)`` the reward of the greedy completion of the row's prompt. Functions that
shape the rewards of rows before are called alike and return rewards; they may also ask for ``ended (b,)``: the
response ended by itself.

- Statistics go by ``group_id`` (any integers, rows in any order), never by position.
- A NaN reward marks a row that could not be scored: it is left out of all statistics and its advantage is 0. Infinite
  rewards have no advantage; refuse them before.
- Where an estimator compares the rows of a group, a group with fewer than two scored rows says nothing about its rows:
  they get 0.
- Standard deviations divide by ``n - 1`` unless said otherwise. All is computed in float64 on differences from the
  group's lowest value, so groups of equal values have a spread of exactly 0, never rounding noise blown up by a small
  denominator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from lit_rl.ops.ranges import NotNegative, Positive
from lit_rl.ops.traits import AdvantageTraits

__all__ = [
    "batch_normalized",
    "centered",
    "constant",
    "cpgd",
    "gpg",
    "group_normalized",
    "group_std",
    "leave_one_out",
    "maxrl",
    "missing_eos",
    "no_advantage",
    "normalize_then_sum",
    "opo",
    "pass_at_k",
    "raw",
    "relative_length_penalty",
    "relative_length_reward",
    "remax",
    "whiten_rows",
    "whiten_tokens",
]


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
        index = renumber(group_id)
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


def renumber(ids: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
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


def missing_eos(
    rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"], ended: Bool[Tensor, " b"], *, penalty: Positive = 1.0
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
    rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"], lengths: Int[Tensor, " b"], *, weight: NotNegative = 0.25
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
    weight: NotNegative = 1.0,
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


@AdvantageTraits(compares_group=False)
def raw(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """``r``: REINFORCE (Williams, 1992) without a baseline, for rewards that are already centred."""
    return rewards.nan_to_num(0.0)


@AdvantageTraits(compares_group=True)
def group_normalized(
    rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"], *, eps: float = 1e-4
) -> Float[Tensor, " b"]:
    """``(r - mean_group) / (std_group + eps)``: GRPO (2402.03300, section 4.1.2).

    Args:
        rewards: NaN: not scored.
        group_id: Of each row.
        eps: Added to the standard deviation.
    """
    groups = Groups.of(rewards, group_id)
    return divide(groups.deviation, groups.std(), eps).to(rewards.dtype)


@AdvantageTraits(compares_group=True)
def batch_normalized(
    rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"], *, eps: float = 1e-4
) -> Float[Tensor, " b"]:
    """``(r - mean_group) / (std_batch + eps)``, the deviation being over all scored rows: Lite PPO (2508.08221).

    Args:
        rewards: Of the whole batch: those of every rank.
        group_id: Of each row.
        eps: Added to the standard deviation.
    """
    batch = Groups.of(rewards, torch.zeros_like(group_id))
    return divide(Groups.of(rewards, group_id).deviation, batch.std(), eps).to(rewards.dtype)


@AdvantageTraits(compares_group=True)
def centered(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """``r - mean_group``: Dr. GRPO (2503.20783), which divides by no deviation."""
    return Groups.of(rewards, group_id).deviation.to(rewards.dtype)


@AdvantageTraits(compares_group=True)
def leave_one_out(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """``r - mean of the group's other rows``: RLOO (2402.14740). Equals ``n / (n - 1)`` times :func:`centered`."""
    groups = Groups.of(rewards, group_id)
    return (groups.deviation * groups.size / (groups.size - 1).clamp(min=1)).to(rewards.dtype)


@AdvantageTraits(compares_group=True, reads_rewards=False, reads_kl=False)
def normalize_then_sum(
    rewards: Float[Tensor, " b"],
    group_id: Int[Tensor, " b"],
    values: Float[Tensor, "b k"],
    weights: Float[Tensor, "b k"] | Float[Tensor, " k"],
    *,
    eps: float = 1e-4,
) -> Float[Tensor, " b"]:
    """Normalise each reward function on its own, so that none drowns the others: GDPO (2601.05242).

    ``z_k = (r_k - mean_group) / (std_group + eps)``, ``s = sum_k w_k z_k`` and ``A = (s - mean) / (std + eps)`` over
    all scored rows of the batch. A function that does not apply to a row adds 0 to its sum. Weights act after the
    normalisation: it would divide one that was in the values already out again.

    Args:
        rewards: Only say which rows are scored: what was made of the sum of functions (a KL term, shaping) is not seen.
        group_id: Of each row.
        values: Of each function; NaN: does not apply.
        weights: Of the functions, for each row or for all.
        eps: Added to both standard deviations.
    """
    unscored = rewards.isnan()
    total = torch.zeros_like(rewards, dtype=torch.float64)
    columns = values.masked_fill(unscored.unsqueeze(1), torch.nan).unbind(1)
    for value, weight in zip(columns, weights.expand_as(values).unbind(1), strict=True):
        groups = Groups.of(value, group_id)
        total = total + weight * divide(groups.deviation, groups.std(), eps)
    batch = Groups.of(total.masked_fill(unscored, torch.nan), torch.zeros_like(group_id))
    return divide(batch.deviation, batch.std(), eps).to(rewards.dtype)


@AdvantageTraits(compares_group=True)
def opo(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"], lengths: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """``r - sum(length r) / sum(length)`` over the group: the baseline of least variance of OPO (2505.23585).

    It is optimal where the squared norm of a response's gradient grows with its length. Advantages sum to 0 when
    weighted by length. A group without any token gets 0.
    """
    groups = Groups.of(rewards, group_id)
    tokens = lengths.masked_fill(~groups.scored, 0).double()
    total = group_sum(tokens, groups.index)
    offset = group_sum(tokens * groups.deviation, groups.index) / total.clamp(min=1)
    return (groups.deviation - offset).masked_fill(~groups.scored | (total == 0), 0.0).to(rewards.dtype)


@AdvantageTraits(compares_group=True)
def pass_at_k(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"], *, eps: float = 1e-6) -> Float[Tensor, " b"]:
    """``(r_max - r_second) / (std_group + eps)`` for the best row of a group, 0 for the others (2503.19595, as verl).

    What the group's maximum would lose without the row: the gradient of the best of k, for a group of k completions.
    Of two best rows neither would be missed, so both get 0.

    Args:
        rewards: NaN: not scored.
        group_id: Of each row.
        eps: Added to the standard deviation.
    """
    groups = Groups.of(rewards, group_id)
    above = groups.deviation.masked_fill(~groups.scored, -torch.inf)
    best = groups.scored & (above == group_max(above, groups.index))
    second = group_max(above.masked_fill(best, -torch.inf), groups.index)
    only = best & (group_sum(best.long(), groups.index) == 1) & (groups.size > 1)
    lead = (above - second).masked_fill(~only, 0.0)
    return divide(lead, groups.std(), eps).to(rewards.dtype)


@AdvantageTraits(compares_group=True)
def gpg(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """``alpha (r - mean_group)`` with ``alpha = rows / rows of groups with spread``: GPG (2504.02546).

    Groups whose rewards are all equal have no gradient and dilute the mean over the batch; alpha makes up for it. Both
    counts are over the scored rows of the whole batch: pass those of every rank. verl counts the rows with a reward
    other than 0 in the denominator instead, which depends on what a wrong answer is worth.
    """
    groups = Groups.of(rewards, group_id)
    useful = (groups.scored & (groups.squares() > 0)).sum()
    return (groups.deviation * groups.scored.sum() / useful.clamp(min=1)).to(rewards.dtype)


@AdvantageTraits(compares_group=True)
def maxrl(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """``(r - mean_group) / mean_group``, 0 where the mean is not above 0: MaxRL (2602.02710).

    For rewards of 0 and 1 the expected gradient is that of the log-likelihood of a right answer, expanded to an order
    that grows with the group; the plain policy gradient is its first order. Negative rewards have no such meaning.
    """
    groups = Groups.of(rewards, group_id)
    positive = groups.mean > 0
    return (groups.deviation / groups.mean.masked_fill(~positive, torch.inf)).to(rewards.dtype)


@AdvantageTraits(compares_group=False)
def remax(
    rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"], greedy_rewards: Float[Tensor, " b"]
) -> Float[Tensor, " b"]:
    """``r - reward of the greedy completion of the same prompt``: ReMax (2310.10505, algorithm 1).

    It needs no group: one completion a prompt is enough. 0 where the greedy completion could not be scored.
    """
    return (rewards - greedy_rewards).nan_to_num(0.0)


@AdvantageTraits(compares_group=True)
def cpgd(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"], *, eps: float = 1e-6) -> Float[Tensor, " b"]:
    """``(r - mean_group) / (std_group + eps)`` with ``n``, not ``n - 1``, in the deviation: CPGD (2505.12504).

    Args:
        rewards: NaN: not scored.
        group_id: Of each row.
        eps: Added to the standard deviation.
    """
    groups = Groups.of(rewards, group_id)
    std = (groups.squares() / groups.size.clamp(min=1)).sqrt()
    return divide(groups.deviation, std, eps).to(rewards.dtype)


def group_std(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return the standard deviation of each row's group, for ``frac_reward_zero_std``; 0 on NaN rows and in groups of
    one row."""
    groups = Groups.of(rewards, group_id)
    return groups.std().masked_fill(~groups.scored, 0.0).to(rewards.dtype)


def whiten_rows(
    advantages: Float[Tensor, " b"], scored: Bool[Tensor, " b"], *, eps: float = 1e-4
) -> Float[Tensor, " b"]:
    """``(A - mean) / (std + eps)`` over the scored rows, 0 on the others: `normalize_advantages` of TRL's RLOO.

    Args:
        advantages: Of the whole batch: those of every rank.
        scored: Rows that count.
        eps: Added to the standard deviation.
    """
    everything = torch.zeros(advantages.shape, dtype=torch.long, device=advantages.device)
    batch = Groups.of(advantages.masked_fill(~scored, torch.nan), everything)
    return divide(batch.deviation, batch.std(), eps).to(advantages.dtype)


def whiten_tokens(
    advantages: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], *, eps: float = 1e-8
) -> Float[Tensor, "b t"]:
    """``(A - mean) / sqrt(var + eps)`` over the tokens of the mask, 0 outside; the variance divides by ``n - 1``.

    Args:
        advantages: Of the whole batch: those of every rank.
        mask: Tokens that count.
        eps: Added to the variance.
    """
    flat = advantages[mask]
    tokens = Groups.of(flat, torch.zeros(flat.shape, dtype=torch.long, device=flat.device))
    scale = (tokens.std().square() + eps).sqrt()
    out = torch.zeros_like(advantages)
    out[mask] = divide(tokens.deviation, scale, 0.0).to(advantages.dtype)
    return out


@AdvantageTraits(compares_group=False, reads_rewards=False, reads_kl=False)
def no_advantage(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return 0 for every row: nothing is learned from the rewards, which are logged and may choose.

    A teacher alone teaches then (`algo/teacher`).

    Args:
        rewards: Not read.
        group_id: Not read.
    """
    return torch.zeros_like(rewards)


@AdvantageTraits(compares_group=False, reads_rewards=False, reads_kl=False)
def constant(rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return 1 for every scored row, 0 for the others: with the loss ``-lp A`` the cross-entropy of the samples.

    The expected gradient over *all* samples of a policy is then 0; it teaches something only where a selection by
    reward came first (`algo/groups=best`: RAFT, 2304.06767).

    Args:
        rewards: NaN: not scored.
        group_id: Of each row; not read.
    """
    return (~rewards.isnan()).to(rewards.dtype)
