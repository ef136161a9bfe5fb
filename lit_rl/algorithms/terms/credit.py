"""From what rewards said to rewards of rows and of tokens: the steps between a score and an advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_rl.algorithms.preflight.estimators import by_tokens, whitening_fits
from lit_rl.algorithms.ranks import named
from lit_rl.errors import ConfigError
from lit_rl.generation.collect import response_ids
from lit_rl.ops.kl import k1
from lit_rl.ops.masking import masked_mean, masked_sum
from lit_rl.rewards.sums.weighted import Scores
from lit_rl.rollout import Completions, Rollout

if TYPE_CHECKING:
    from lit_rl.algorithms.families.policy_gradient import PolicyGradient

Span = tuple[int, int, float]


@dataclass(frozen=True)
class Credit:
    """What an advantage is estimated from."""

    rewards: Tensor
    """Float32 `(b,)`: shaped, normalised, clipped, less the KL of the row; NaN where no function applied."""
    token_rewards: Tensor
    """Float32 `(b, t)`: the same, at the tokens where they were earned."""
    step_ends: Tensor
    """Bool `(b, t)`: the tokens where something was earned: ends of spans, and of rows without spans."""
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None


def credit_of(module: PolicyGradient, completions: Completions, scores: Scores, kept: Tensor | None) -> Credit:
    """Rewards of rows and of tokens, and the log-probs that they and the loss need."""
    mask = completions.response_mask
    if scores.span_rewards is not None:
        _refuse_changed_spans(module)
    total = scores.total.to(mask.device)
    rewards = shaped(module, completions, total if kept is None else total.masked_fill(~kept, torch.nan))
    per_token, step_ends = token_rewards(rewards, completions, scores.span_rewards, module.tokenizer)
    old = module.old_logprobs(completions) if module.needs_old_logprobs else None
    ref = module.ref_logprobs(completions) if module.needs_reference else None
    module.kl_factor = module.kl_control.factor
    if old is not None and ref is not None:
        _tell_controller(module, old, ref, mask)
        if module.reward_beta:
            kl = module.reward_kl(old, ref, old, **named(module.reward_kl, {"mask": mask}))
            penalty = (module.reward_beta * module.kl_factor * kl).masked_fill(~mask, 0.0)
            per_token = per_token - penalty.masked_fill(rewards.isnan()[:, None], 0.0)
            rewards = rewards - penalty.sum(1)
            if not module.beta:
                module.record({"kl": (masked_sum(kl, mask), mask.sum())})
    return Credit(rewards, per_token, step_ends, old, ref)


def shaped(module: PolicyGradient, completions: Completions, rewards: Tensor) -> Tensor:
    """Rewards of rows after shaping, running normalisation and clipping, in this order."""
    if module.shaping is not None:
        offered = {"lengths": completions.lengths, "ended": completions.ended}
        rewards = module.shaping(rewards, completions.group_id, **named(module.shaping, offered))
    if module.reward_norm is not None:
        norm, columns = module.reward_norm, {"rewards": rewards, "group_id": completions.group_id}
        rewards = module.over_all_ranks(lambda everyones, group_id: norm(everyones), columns)
    return _clipped(module, rewards)


def greedy_baseline(module: PolicyGradient, greedy_rewards: Tensor) -> Tensor:
    """Greedy rewards on the scale of those that they are compared with. The norm learns from the drawn ones only."""
    scaled = greedy_rewards if module.reward_norm is None else module.reward_norm.scaled(greedy_rewards)
    return _clipped(module, scaled)


def _clipped(module: PolicyGradient, rewards: Tensor) -> Tensor:
    return rewards if module.reward_clip is None else rewards.clamp(*module.reward_clip)


def _refuse_changed_spans(module: PolicyGradient) -> None:
    """The change of a row's reward has no place among its spans: the last token would be blamed for all of it."""
    changes = {"shaping": module.shaping, "reward_norm": module.reward_norm, "reward_clip": module.reward_clip}
    if changed := [f"algo.{name}" for name, value in changes.items() if value is not None]:
        raise ConfigError(
            f"{', '.join(changed)}: the reward functions returned spans, and this changes the reward of a whole "
            "completion, of which no span would have its share. Leave it out, or change the values of the spans in the "
            "reward function."
        )


def _tell_controller(module: PolicyGradient, old: Tensor, ref: Tensor, mask: Tensor) -> None:
    """How far the policy is from the reference: the mean over rows of the mean k1 of their tokens."""
    per_row = masked_mean(k1(old, ref, old), mask, dim=1)
    mine = torch.stack([per_row.sum(), mask.any(1).sum().float()])
    total, rows = (module.everyones(mine[None]).sum(0) if module.trainer_or_none else mine).tolist()
    module.kl_control.update(total / max(1.0, rows), int(rows))


def token_rewards(
    rewards: Tensor, completions: Completions, spans: Sequence[Sequence[Span]] | None, tokenizer: Any
) -> tuple[Tensor, Tensor]:
    """`(b, t)`: each row's reward at the token where it was earned, 0 everywhere in a row without a reward; and where.

    A span's value stands at the token that writes its last character. What is left of the row's reward (all of it, if
    no function gave spans) stands at the row's last token. So a row always sums to its reward.
    """
    mask = completions.response_mask
    out, ends = torch.zeros(mask.shape, device=rewards.device), torch.zeros_like(mask)
    rest = rewards.nan_to_num(0.0).clone()
    if spans is not None:
        ids = response_ids(completions)
        for row, row_spans in enumerate(spans):
            if not rewards[row].isnan():
                for _, end, value in row_spans:
                    token = _token_at(ids[row], end, tokenizer)
                    out[row, token] += value
                    ends[row, token] = True
                    rest[row] -= value
    rows = mask.any(1).nonzero().flatten()
    last = (torch.arange(mask.shape[1], device=mask.device) * mask).amax(1)
    out[rows, last[rows]] += rest[rows]
    without_spans = rows[~ends[rows].any(1)]
    ends[without_spans, last[without_spans]] = True
    return out, ends


def _token_at(ids: list[int], end: int, tokenizer: Any) -> int:
    """Index of the first token with which the text's first `end` characters are written: a search over prefixes.

    Part of a character's bytes is text already, but other text: it is compared, not counted.
    """
    wanted = tokenizer.decode(ids, skip_special_tokens=True)[:end]
    low, high = 0, len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        if tokenizer.decode(ids[: middle + 1], skip_special_tokens=True)[:end] == wanted:
            high = middle
        else:
            low = middle + 1
    return low


def whitened(module: PolicyGradient, rollout: Rollout) -> Rollout:
    """The rollout with its advantages whitened over every rank; what has no reward takes no part.

    Where tokens are whitened and an advantage is a row's, each of the row's tokens has it: a long row counts for more.
    """
    whitening, advantages = module.whitening, rollout.advantages
    if whitening is None:
        return rollout
    whitening_fits(whitening, module.advantage, of_tokens=advantages.ndim == 2)
    scored = ~rollout.rewards.isnan()
    mask = rollout.completions.response_mask & scored[:, None]
    if advantages.ndim == 1 and by_tokens(whitening):
        advantages = torch.where(mask, advantages[:, None], 0.0)
    columns = {"rewards": advantages, "group_id": rollout.completions.group_id, "scored": scored, "mask": mask}

    def of_everyone(advantages: Tensor, group_id: Tensor, mask: Tensor, scored: Tensor) -> Tensor:
        return whitening(advantages, **named(whitening, {"mask": mask, "scored": scored}))

    return replace(rollout, advantages=module.over_all_ranks(of_everyone, columns))
