"""Rewards of tokens to advantages of tokens.

``token_rewards (b, t)`` holds each reward at the token where it was earned: the last one, or the end of a span or turn.
``mask (b, t)`` are the tokens that the policy wrote. Tokens that it did not write (a tool's answer, padding) are passed
over: they earn nothing, take no time (no discount), and get 0. What stands there, NaN included, changes nothing.

Estimators are called as those of :mod:`lit_rl.ops.advantages`, with the same rules for groups and for NaN rewards, and
return ``(b, t)``. Sums are taken in float64.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from lit_rl.ops.advantages import whiten_tokens
from lit_rl.ops.grouped import Groups, divide


def return_to_go(
    token_rewards: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], *, gamma: float = 1.0
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


def gae(
    token_rewards: Float[Tensor, "b t"],
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
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


def reinforce_plus_plus(
    rewards: Float[Tensor, " b"],
    group_id: Int[Tensor, " b"],
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    gamma: float = 1.0,
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
