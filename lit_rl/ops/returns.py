"""Rewards of tokens to advantages of tokens or turns, and the loss of a critic that predicts returns.

``token_rewards (b, t)`` holds each reward at the token where it was earned: the last one, or the end of a span or
turn. ``mask (b, t)`` are the tokens that the policy wrote. Tokens that it did not write (a tool's answer, padding)
are passed over: they earn nothing, take no time (no discount), and get 0. What stands there, NaN included, changes
nothing.

Estimators are called as those of :mod:`lit_rl.ops.advantages`, with the same rules for groups and for NaN rewards,
and return ``(b, t)``. Sums are taken in float64.

``gradient_norms (b, t)``, a column for those that name it, is the squared norm of the gradient of each token's log-prob
by the logits.

Estimators of turns take a turn of a conversation as one action, whose tokens share its credit. ``turn (b, t)`` is the
number of the turn that a token belongs to, ``R_k`` what the tokens of turn ``k`` earned, and ``G_k = R_k + gamma
G_(k+1)`` the return from it on: one discount a turn, however long turns are. Rows of a single turn have turn 0 alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch.nn import functional as F

from lit_rl.ops.advantages import Groups, divide, group_max, group_sum, renumber, whiten_tokens
from lit_rl.ops.ranges import NotNegative, Portion
from lit_rl.ops.reductions import Metrics, masked_sum
from lit_rl.ops.traits import AdvantageTraits

__all__ = [
    "centered_return_to_go",
    "centered_turns",
    "check_share",
    "discounted_return",
    "gae",
    "gae_of_turns",
    "gigpo",
    "optimal_token_baseline",
    "process_supervised",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax_return_to_go",
    "return_to_go",
]


def return_to_go(
    token_rewards: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], *, gamma: Portion = 1.0
) -> Float[Tensor, "b t"]:
    """``G_t = r_t + gamma G_(t+1)`` over the tokens of the mask; 0 outside.

    Args:
        token_rewards: Rewards.
        mask: Tokens that the policy wrote.
        gamma: Discount of each token, in [0, 1].

    Raises:
        ValueError: gamma is out of range.
    """
    return _return_to_go(token_rewards, mask, gamma).to(token_rewards.dtype)


@AdvantageTraits(compares_group=False, of_tokens=True)
def gae(
    token_rewards: Float[Tensor, "b t"],
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    gamma: Portion = 1.0,
    lam: Portion = 0.95,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """Return generalised advantages (GAE, 1506.02438, eq. 16) and the returns that the critic learns, 0 outside the
    mask.

    ``d_t = r_t + gamma V_(t+1) - V_t``, ``A_t = d_t + gamma lam A_(t+1)`` and ``return_t = A_t + V_t``. The value after
    the last token is 0: a response that was cut counts as ended. Advantages are not whitened.

    Args:
        token_rewards: Rewards.
        values: Of the critic at the position that predicts the token.
        mask: Tokens that the policy wrote.
        gamma: Discount of each token, in [0, 1].
        lam: From 0 (the critic is trusted for everything after one token) to 1 (for nothing).

    Raises:
        ValueError: gamma or lam is out of range.
    """
    check_share("gamma", gamma)
    check_share("lam", lam)
    values = values.double().masked_fill(~mask, 0.0)
    following = F.pad(_accumulate(values, (~mask).double())[:, 1:], (0, 1))
    delta = (token_rewards.double() + gamma * following - values).masked_fill(~mask, 0.0)
    advantages = _accumulate(delta, _discount(mask, gamma * lam)).masked_fill(~mask, 0.0)
    return advantages.to(token_rewards.dtype), (advantages + values).to(token_rewards.dtype)


@AdvantageTraits(compares_group=False, of_tokens=True)
def discounted_return(
    rewards: Float[Tensor, " b"],
    group_id: Int[Tensor, " b"],
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    gamma: Portion = 1.0,
) -> Float[Tensor, "b t"]:
    """Return ``G_t = r_t + gamma G_(t+1)`` itself, without a baseline.

    With ``gamma=0`` a token is credited with what it earned alone. Where that is the KL to a teacher, ``r_t = log T -
    log S``, the expected gradient is that of ``KL(S || T)`` at each position: on-policy distillation.

    Args:
        rewards: Only say which rows are scored.
        group_id: Not used.
        token_rewards: Rewards, each at the token where it was earned.
        mask: Tokens that the policy wrote.
        gamma: Discount of each token, in [0, 1].
    """
    return return_to_go(token_rewards, mask & ~rewards.isnan().unsqueeze(1), gamma=gamma)


@AdvantageTraits(compares_group=False, of_tokens=True)
def reinforce_plus_plus(
    rewards: Float[Tensor, " b"],
    group_id: Int[Tensor, " b"],
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    gamma: Portion = 1.0,
    eps: float = 1e-8,
) -> Float[Tensor, "b t"]:
    """Return the return to go, whitened over all tokens of the batch: REINFORCE++ (2501.03262). It needs no group.

    Args:
        rewards: Only say which rows are scored.
        group_id: Not used.
        token_rewards: Of the whole batch: those of every rank. The paper has the KL per token in them.
        mask: Tokens that the policy wrote.
        gamma: Discount of each token, in [0, 1].
        eps: Added to the variance.
    """
    mask = mask & ~rewards.isnan().unsqueeze(1)
    return whiten_tokens(_return_to_go(token_rewards, mask, gamma), mask, eps=eps).to(token_rewards.dtype)


@AdvantageTraits(compares_group=True, of_tokens=True)
def reinforce_plus_plus_baseline(
    rewards: Float[Tensor, " b"], group_id: Int[Tensor, " b"], mask: Bool[Tensor, "b t"], *, eps: float = 1e-8
) -> Float[Tensor, "b t"]:
    """``r - mean_group`` at every token, whitened over all tokens of the batch: REINFORCE++-baseline (2501.03262).

    Args:
        rewards: Of the whole batch: those of every rank.
        group_id: Of each row.
        mask: Tokens that the policy wrote.
        eps: Added to the variance.
    """
    groups = Groups.of(rewards, group_id)
    mask = mask & groups.scored.unsqueeze(1)
    return whiten_tokens(groups.deviation.unsqueeze(1).expand(mask.shape), mask, eps=eps).to(rewards.dtype)


@AdvantageTraits(compares_group=True, of_tokens=True)
def centered_return_to_go(
    rewards: Float[Tensor, " b"],
    group_id: Int[Tensor, " b"],
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
) -> Float[Tensor, "b t"]:
    """``G_t`` minus the mean over the group of what a whole row earned: for rewards of spans or turns.

    A token is credited with what was earned from it on. Where everything is earned at the last token this is
    :func:`lit_rl.ops.advantages.centered`. The gradient without the baseline would have the same expectation.
    """
    mask = mask & ~rewards.isnan().unsqueeze(1)
    returns = _return_to_go(token_rewards, mask, 1.0)
    earned = F.pad(returns, (0, 1)).gather(1, _first(mask).unsqueeze(1)).squeeze(1)
    groups = Groups.of(earned.masked_fill(rewards.isnan(), torch.nan), group_id)
    counts = mask & (groups.size > 1).unsqueeze(1)
    return (returns - groups.mean.unsqueeze(1)).masked_fill(~counts, 0.0).to(token_rewards.dtype)


@AdvantageTraits(compares_group=True, of_tokens=True)
def optimal_token_baseline(
    rewards: Float[Tensor, " b"],
    group_id: Int[Tensor, " b"],
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    gradient_norms: Float[Tensor, "b t"],
) -> Float[Tensor, "b t"]:
    """``G_t - B_t`` with the baseline of least variance at each position: OTB (2602.07078).

    ``B_t = sum G_t W_t / sum W_t`` over the rows of the group that have a ``t``-th token, with ``W_t`` the sum of
    ``gradient_norms`` up to it: the squared norm of the gradient of the row so far, if those of its tokens are at
    right angles. A token that no other row has a counterpart of gets 0, as do tokens that were certain from the start
    on, which have no gradient. Advantages, weighted by ``W_t``, sum to 0 at each position.

    Args:
        rewards: Only say which rows are scored.
        group_id: Of each row.
        token_rewards: Rewards, each at the token where it was earned.
        mask: Tokens that the policy wrote: the ``t``-th is counted among them.
        gradient_norms: ``1 - 2 p + sum_v p_v^2`` of the policy that took the rollout: the squared norm of the gradient
            of each log-prob by the logits.
    """
    mask = mask & ~rewards.isnan().unsqueeze(1)
    returns = _return_to_go(token_rewards, mask, 1.0)[mask]
    weights = gradient_norms.double().masked_fill(~mask, 0.0).cumsum(1)[mask]
    places = renumber(group_id).unsqueeze(1) * mask.shape[1] + mask.cumsum(1) - 1
    index = renumber(places[mask])
    above = returns + group_max(-returns, index)  # from the lowest: equal returns are 0 from their baseline, exactly
    total = group_sum(weights, index)
    offset = group_sum(weights * above, index) / total.masked_fill(total == 0, 1.0)
    advantages = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    advantages[mask] = (above - offset).masked_fill(total == 0, 0.0)
    return advantages.to(token_rewards.dtype)


@AdvantageTraits(compares_group=False, of_tokens=True)
def remax_return_to_go(
    rewards: Float[Tensor, " b"],
    group_id: Int[Tensor, " b"],
    greedy_rewards: Float[Tensor, " b"],
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
) -> Float[Tensor, "b t"]:
    """``G_t - reward of the greedy completion of the same prompt``: ReMax (2310.10505) for rewards within a response.

    Where everything is earned at the last token this is :func:`lit_rl.ops.advantages.remax` at every token. 0 on rows
    whose greedy completion could not be scored.
    """
    known = ~(rewards.isnan() | greedy_rewards.isnan())
    mask = mask & known.unsqueeze(1)
    returns = _return_to_go(token_rewards, mask, 1.0) - greedy_rewards.double().unsqueeze(1)
    return returns.masked_fill(~mask, 0.0).to(token_rewards.dtype)


@AdvantageTraits(compares_group=True, of_tokens=True, reads_kl=False)
def process_supervised(
    rewards: Float[Tensor, " b"],
    group_id: Int[Tensor, " b"],
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    step_ends: Bool[Tensor, "b t"] | None = None,
    *,
    eps: float = 1e-4,
) -> Float[Tensor, "b t"]:
    """Return advantages of GRPO with a reward for each step of a response (2402.03300, section 4.1.3).

    ``z = (r - mean) / (std + eps)`` over all step rewards of the group, and ``A_t`` is the sum of the ``z`` of the
    steps that end at t or later. A group with one step reward gets 0.

    Args:
        rewards: Only say which rows are scored.
        group_id: Of each row.
        token_rewards: The reward of a step at its last token, without a KL term, which would make every token a step.
        mask: Tokens that the policy wrote.
        step_ends: Where steps end. None: at every reward other than 0, so that steps worth exactly 0 are not counted.
        eps: Added to the standard deviation.
    """
    mask = mask & ~rewards.isnan().unsqueeze(1)
    steps = mask & (token_rewards != 0 if step_ends is None else step_ends)
    groups = Groups.of(token_rewards[steps], group_id.unsqueeze(1).expand(mask.shape)[steps])
    normalized = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    normalized[steps] = divide(groups.deviation, groups.std(), eps)
    return _return_to_go(normalized, mask, 1.0).to(token_rewards.dtype)


def _return_to_go(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    check_share("gamma", gamma)
    earned = token_rewards.double().masked_fill(~mask, 0.0)
    return _accumulate(earned, _discount(mask, gamma)).masked_fill(~mask, 0.0)


def _discount(mask: Tensor, gamma: float) -> Tensor:
    return torch.ones(mask.shape, dtype=torch.float64, device=mask.device).masked_fill(mask, gamma)


def _accumulate(x: Tensor, discount: Tensor) -> Tensor:
    """Compute ``y_t = x_t + discount_t y_(t+1)`` along the rows, nothing coming after the end.

    Windows of doubling width are joined, so that long responses take log2(t) steps and not t.
    """
    width = 1
    while width < x.shape[1]:
        x = x + discount * F.pad(x[:, width:], (0, width))
        discount = discount * F.pad(discount[:, width:], (0, width))
        width *= 2
    return x


def _first(mask: Tensor) -> Tensor:
    """Return the index of each row's first True; one past the end where there is none."""
    return torch.where(mask.any(1), mask.int().argmax(1), mask.shape[1])


def check_share(name: str, value: float) -> None:
    """Refuse a discount, or a decay of traces, that is out of range.

    Raises:
        ValueError: it is not in [0, 1].
    """
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} is out of range: allowed is [0, 1].")


_EPS = 1e-6
"""Added to standard deviations."""


@AdvantageTraits(compares_group=True, of_tokens=True)
def centered_turns(
    rewards: Float[Tensor, " b"],
    group_id: Int[Tensor, " b"],
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    turn: Int[Tensor, "b t"],
    *,
    gamma: Portion = 1.0,
) -> Float[Tensor, "b t"]:
    """``G_k`` minus the mean of ``G_k`` over the rows of the group that have a turn ``k``: a baseline for each turn.

    Late turns have less left to earn than early ones, and are compared with each other. A turn that no other row of the
    group has gets 0. With one turn a row this is :func:`lit_rl.ops.advantages.centered`.

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


@AdvantageTraits(compares_group=True, of_tokens=True)
def gigpo(
    rewards: Float[Tensor, " b"],
    group_id: Int[Tensor, " b"],
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    turn: Int[Tensor, "b t"],
    state: Int[Tensor, "b t"],
    *,
    gamma: Portion = 0.95,
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


@AdvantageTraits(compares_group=False, of_tokens=True)
def gae_of_turns(
    token_rewards: Float[Tensor, "b t"],
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    turn: Int[Tensor, "b t"],
    *,
    gamma: Portion = 0.99,
    lam: Portion = 0.9,
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


def clipped_value_loss(
    values: Float[Tensor, "b t"],
    old_values: Float[Tensor, "b t"],
    returns: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    clip: float | None = 0.2,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """PPO's value loss for each token (2005.12729, appendix A), to be minimised; 0 outside the mask.

    ``max((V - R)^2, (V_clip - R)^2) / 2`` with ``V_clip = clip(V, V_old - clip, V_old + clip)``. A value that has moved
    by more than ``clip`` in the direction of its return has no gradient; one that has moved away from it has.

    Args:
        values: Of the critic now, with gradient.
        old_values: Of the critic that took the rollout.
        returns: What the values are to predict.
        mask: Loss mask. What stands outside it, NaN included, changes nothing.
        clip: How far a value may move in one rollout, at least 0, in units of the reward. None: as far as it likes.

    Returns:
        Losses of tokens, and metrics averaged over the tokens of the mask: ``value/clipfrac_avg`` (share of tokens
        whose clipped error is the larger one), ``value/error`` (squared error), ``value/mean`` and ``return/mean``.
    """
    values = values.float().masked_fill(~mask, 0.0)
    old_values = old_values.detach().float().masked_fill(~mask, 0.0)
    returns = returns.detach().float().masked_fill(~mask, 0.0)
    error = (values - returns).square()
    worst = error
    if clip is not None:
        worst = torch.maximum(error, (values.clamp(old_values - clip, old_values + clip) - returns).square())
    means = {
        "value/clipfrac_avg": (worst > error).float(),
        "value/error": error.detach(),
        "value/mean": values.detach(),
        "return/mean": returns,
    }
    count = mask.sum().float()
    return worst / 2, {name: (masked_sum(value, mask), count) for name, value in means.items()}


def value_sums(
    values: Float[Tensor, "b t"], returns: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float64[Tensor, "5"]:
    """Return the sums for :func:`explained_variance`: add these up over micro-batches and ranks.

    Number of tokens, then sum and sum of squares of the returns, and of ``R - V``.
    """
    returns = returns.detach().double().masked_fill(~mask, 0.0)
    error = returns - values.detach().double().masked_fill(~mask, 0.0)
    count = mask.sum().double()
    return torch.stack([count, returns.sum(), returns.square().sum(), error.sum(), error.square().sum()])


def explained_variance(sums: Float64[Tensor, "5"]) -> Float64[Tensor, ""]:
    """``1 - Var(R - V) / Var(R)``: 1 is perfect, 0 no better than a constant, below 0 worse than that.

    NaN where the returns do not vary, so that there is nothing to explain.
    """
    count, returns, returns_squared, error, error_squared = sums.unbind()
    variance = returns_squared / count - (returns / count).square()
    left = error_squared / count - (error / count).square()
    varies = variance > 1e-12 * returns_squared / count
    return torch.where(varies, 1 - left / variance, torch.nan)
