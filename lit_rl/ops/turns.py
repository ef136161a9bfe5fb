"""Rewards of tokens to advantages of turns: a turn of a conversation is one action, whose tokens share its credit.

``R_k`` is what the tokens of turn ``k`` earned, and ``G_k = R_k + gamma G_(k+1)`` the return from it on: the discount
is one a turn, however long turns are. ``mask (b, t)`` are the tokens that the policy wrote, ``turn (b, t)`` the number
of the turn that each belongs to. What stands outside the mask, NaN included, changes nothing, and gets 0.

Estimators are called as those of :mod:`lit_rl.ops.returns`, with the same rules for groups and for NaN rewards. Rows of
a single turn are the case of turn 0 alone. Sums are taken in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from lit_rl.ops.grouped import Groups, divide
from lit_rl.ops.ranges import NotNegative
from lit_rl.ops.returns import check_share

_EPS = 1e-6
"""Added to standard deviations."""


def centered_turns(
    rewards: Float[Tensor, " b"],
    group_id: Int[Tensor, " b"],
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    turn: Int[Tensor, "b t"],
    *,
    gamma: float = 1.0,
) -> Float[Tensor, "b t"]:
    """``G_k`` minus the mean of ``G_k`` over the rows of the group that have a turn ``k``: a baseline for each turn.

    Late turns have less left to earn than early ones, and are compared with each other. A turn that no other row of the
    group came to gets 0. With one turn a row this is :func:`lit_rl.ops.advantages.centered`.

    Args:
        rewards: Only say which rows are scored.
        group_id: Of each row.
        token_rewards: Rewards, each at the token where it was earned.
        mask: Tokens that the policy wrote.
        turn: The turn of each token, counted from 0.
        gamma: Discount of each turn, in [0, 1].
    """
    turns = _Turns.of(mask & ~rewards.isnan().unsqueeze(1), turn)
    alike = turns.alike(group_id, torch.arange(turns.there.shape[1], device=mask.device).expand(turns.there.shape))
    compared = Groups.of(turns.returns(token_rewards, gamma)[turns.there], alike)
    return turns.to_tokens(turns.spread(compared.deviation)).to(token_rewards.dtype)


def gigpo(
    rewards: Float[Tensor, " b"],
    group_id: Int[Tensor, " b"],
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    turn: Int[Tensor, "b t"],
    state: Int[Tensor, "b t"],
    *,
    gamma: float = 0.95,
    step_weight: NotNegative = 1.0,
) -> Float[Tensor, "b t"]:
    """GiGPO (2505.10978): rows are compared with their group, and turns with those that began in the same state.

    ``A = (R - mean) / (std + 1e-6) + step_weight (G_k - mean) / (std + 1e-6)``. The first mean and deviation are those
    of what whole rows of the group earned, the second those of the returns of all turns of the group that began in one
    state, in whatever row and at whatever time. A turn whose state no other turn of the group has gets the first alone.

    Args:
        rewards: Only say which rows are scored.
        group_id: Of each row.
        token_rewards: Rewards, each at the token where it was earned.
        mask: Tokens that the policy wrote.
        turn: The turn of each token, counted from 0.
        state: Of each token: equal numbers where turns began in the same state.
        gamma: Discount of each turn, in [0, 1].
        step_weight: Weight of the comparison of turns, 0 or more.
    """
    turns = _Turns.of(mask & ~rewards.isnan().unsqueeze(1), turn)
    earned = turns.sums(token_rewards).sum(1).masked_fill(rewards.isnan(), torch.nan)
    rows = Groups.of(earned, group_id)
    of_rows = divide(rows.deviation, rows.std(), _EPS).unsqueeze(1).expand(turns.there.shape)
    began = state.gather(1, turns.first)
    steps = Groups.of(turns.returns(token_rewards, gamma)[turns.there], turns.alike(group_id, began))
    of_turns = turns.spread(divide(steps.deviation, steps.std(), _EPS))
    return turns.to_tokens(of_rows + step_weight * of_turns).to(token_rewards.dtype)


def gae_of_turns(
    token_rewards: Float[Tensor, "b t"],
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    turn: Int[Tensor, "b t"],
    *,
    gamma: float = 0.99,
    lam: float = 0.9,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """Return generalised advantages with a turn as one action (Turn-PPO, 2512.17008), and the critic's returns.

    ``V_k`` is the value at the first token of turn ``k``, where the policy has read everything and written nothing yet.
    ``d_k = R_k + gamma V_(k+1) - V_k`` and ``A_k = d_k + gamma lam A_(k+1)``; every token of a turn gets ``A_k``, and
    the critic learns ``A_k + V_k`` at each of them. The value after the last turn is 0.

    Args:
        token_rewards: Rewards.
        values: Of the critic at the position that predicts the token.
        mask: Tokens that the policy wrote.
        turn: The turn of each token, counted from 0.
        gamma: Discount of each turn, in [0, 1].
        lam: From 0 (the critic is trusted for everything after one turn) to 1 (for nothing).

    Raises:
        ValueError: gamma or lam is out of range.
    """
    check_share("gamma", gamma)
    check_share("lam", lam)
    turns = _Turns.of(mask, turn)
    before = values.double().gather(1, turns.first).masked_fill(~turns.there, 0.0)
    error = turns.sums(token_rewards) + gamma * turns.following(before) - before
    advantages = turns.discounted(error.masked_fill(~turns.there, 0.0), gamma * lam)
    of_tokens = (turns.to_tokens(part).to(token_rewards.dtype) for part in (advantages, advantages + before))
    return next(of_tokens), next(of_tokens)


@dataclass(frozen=True)
class _Turns:
    """Tokens `(b, t)` as turns `(b, k)`."""

    mask: Bool[Tensor, "b t"]
    turn: Int[Tensor, "b t"]
    """0 outside the mask."""
    there: Bool[Tensor, "b k"]
    """The row has such a turn."""
    first: Int[Tensor, "b k"]
    """The column of its first token; 0 where it is not there."""

    @classmethod
    def of(cls, mask: Tensor, turn: Tensor) -> _Turns:
        turn = turn.masked_fill(~mask, 0)
        most = int(turn.max()) + 1 if turn.numel() else 1
        nowhere = mask.shape[1]
        columns = torch.arange(nowhere, device=mask.device).expand(mask.shape).masked_fill(~mask, nowhere)
        first = columns.new_full((len(mask), most), nowhere).scatter_reduce(1, turn, columns, "amin")
        return cls(mask, turn, first < nowhere, first.masked_fill(first == nowhere, 0))

    def sums(self, of_tokens: Tensor) -> Float64[Tensor, "b k"]:
        """Return the sums over the tokens of each turn."""
        counted = of_tokens.double().masked_fill(~self.mask, 0.0)
        return counted.new_zeros(self.there.shape).scatter_add(1, self.turn, counted)

    def returns(self, token_rewards: Tensor, gamma: float) -> Float64[Tensor, "b k"]:
        check_share("gamma", gamma)
        return self.discounted(self.sums(token_rewards), gamma)

    def discounted(self, of_turns: Tensor, discount: float) -> Float64[Tensor, "b k"]:
        """Compute ``y_k = x_k + discount y_(k+1)`` over the turns that are there."""
        later, found = of_turns.new_zeros(len(of_turns)), []
        for x, there in zip(reversed(of_turns.unbind(1)), reversed(self.there.unbind(1))):
            later = torch.where(there, x + discount * later, later)
            found.append(later)
        return torch.stack(found[::-1], 1)

    def following(self, of_turns: Tensor) -> Float64[Tensor, "b k"]:
        """Return the value of the next turn that is there; 0 after the last."""
        later, found = of_turns.new_zeros(len(of_turns)), []
        for x, there in zip(reversed(of_turns.unbind(1)), reversed(self.there.unbind(1))):
            found.append(later)
            later = torch.where(there, x, later)
        return torch.stack(found[::-1], 1)

    def alike(self, group_id: Tensor, of_turns: Tensor) -> Int[Tensor, " n"]:
        """Return, for the turns that are there, row by row, equal numbers where group and `of_turns` are equal."""
        pairs = torch.stack([group_id.unsqueeze(1).expand(self.there.shape), of_turns], -1)
        return pairs[self.there].unique(dim=0, return_inverse=True)[1]

    def spread(self, of_those_there: Tensor) -> Float64[Tensor, "b k"]:
        """Put values of the turns that are there at their places; 0 elsewhere."""
        return of_those_there.new_zeros(self.there.shape).masked_scatter(self.there, of_those_there)

    def to_tokens(self, of_turns: Tensor) -> Float64[Tensor, "b t"]:
        """Return the value of its turn at every token."""
        return of_turns.gather(1, self.turn).masked_fill(~self.mask, 0.0)
