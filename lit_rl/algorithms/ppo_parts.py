"""What PPO needs beside its objective: frozen values, supervised text, and its metrics under TRL's names."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_rl.algorithms.rollouts.micro_batches import trimmed
from lit_rl.algorithms.terms.credit import Credit
from lit_rl.models.policy.text_forward import score_texts
from lit_rl.ops.losses import MAX_LOG_RATIO
from lit_rl.ops.masking import masked_moments, masked_sum
from lit_rl.ops.ratios import token_ratio
from lit_rl.ops.step import Metrics
from lit_rl.rewards.sums.weighted import Scores
from lit_rl.rollout import Completions, PromptBatch, Rollout, select

if TYPE_CHECKING:
    from lit_rl.algorithms.ppo import PPO


@torch.no_grad()
def frozen_values(module: PPO, completions: Completions) -> Tensor:
    """`(b, t)`: the critic when the rollout is taken, as many rows at once as a micro-batch has."""
    ids = completions.response_ids
    out = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    was_training = module.policy.training
    module.policy.eval()
    try:
        for chunk in torch.arange(len(ids), device=ids.device).split(module.rows_at_once(completions)):
            part, columns = trimmed(select(completions, chunk))
            out[chunk, columns] = module.value_function.values(module.policy, module.critic, part)
    finally:
        module.policy.train(was_training)
    return out


def ptx_share(module: PPO, batch: PromptBatch) -> tuple[Tensor, Metrics]:
    """This micro-batch's share of the cross-entropy of the step's supervised text, times the number of shares.

    The text of an optimizer step is fixed by the step's number, and its rows are dealt out over micro-batches and
    ranks, so the gradient does not depend on how the step is cut.
    """
    assert module.ptx is not None and module.plan is not None
    shares = module.plan.accumulate * module.plan.world_size
    part = batch.slot % module.plan.accumulate * module.plan.world_size + module.global_rank
    texts = module.ptx.batch(module.tokenizer, module.step, module.seed)
    total = texts.learned.sum().clamp(min=1)
    mine = texts.take(slice(part, None, shares)).to(module.device)
    if not len(mine):
        zero = torch.zeros((), device=module.device)
        return zero, {"ptx_loss": (zero, zero)}
    loss = -masked_sum(score_texts(module.policy, mine).logprobs, mine.learned)
    count = mine.learned.sum()
    return loss / total.to(loss.device) * shares, {"ptx_loss": (loss.detach(), count)}


def objective_metrics(module: PPO, completions: Completions, scores: Scores, credit: Credit) -> Metrics:
    """`objective/*` of the rollout: rows without a reward are left out, and what needs log-probs nobody took."""
    device, mask = credit.rewards.device, completions.response_mask
    scored = ~credit.rewards.isnan()
    count = scored.sum().double()
    total = scores.total.to(device)
    per_row = {
        "objective/scores": total,
        "objective/rlhf_reward": credit.rewards,
        "objective/non_score_reward": credit.rewards - total,
    }
    if credit.old_logprobs is not None:
        per_row["objective/entropy"] = -masked_sum(credit.old_logprobs, mask, dim=1)
        if credit.ref_logprobs is not None:
            per_row["objective/kl"] = masked_sum(credit.old_logprobs - credit.ref_logprobs, mask, dim=1)
    metrics: Metrics = {name: (masked_sum(values, scored).double(), count) for name, values in per_row.items()}
    ended = completions.ended.sum().double()
    return metrics | {"value/num_eos_tokens": (ended, torch.ones_like(ended) / module.world_size)}


def ratio_moments(logprobs: Tensor, rollout: Rollout) -> Tensor:
    """`masked_moments` of the ratios of this micro-batch's loss tokens to the policy that took the rollout."""
    mask, now = rollout.loss_mask, logprobs.detach()
    old = now if rollout.old_logprobs is None else rollout.old_logprobs
    return masked_moments(token_ratio(now, old, mask).clamp(max=MAX_LOG_RATIO).exp(), mask)


def policy_metrics(metrics: Metrics) -> Metrics:
    """The policy's metrics under the names of TRL's PPO."""
    names = {
        "policy/approxkl_avg": "approx_kl",
        "policy/clipfrac_avg": "clip_ratio/region_mean",
        "policy/entropy_avg": "entropy",
        "value/ratio": "ratio_mean",
    }
    return {theirs: metrics[ours] for theirs, ours in names.items() if ours in metrics}


def with_values(scores: Scores, name: str, values: Tensor) -> Scores:
    """The scores with one more function of weight 1, which applies to every completion."""
    column = values.detach().float().cpu()
    return dataclasses.replace(
        scores,
        names=(*scores.names, name),
        values=torch.cat([scores.values, column[:, None]], dim=1),
        total=scores.total.nan_to_num(0.0) + column,
        weights=F.pad(scores.weights, (0, 1), value=1.0),
    )
