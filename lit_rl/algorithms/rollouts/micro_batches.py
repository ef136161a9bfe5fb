"""From a rollout to the micro-batch of one slot, and the counts that its loss divides by."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.algorithms.rollouts.plan import BatchPlan, Slot, micro_rows, minibatch_rows
from lit_rl.models.policy.forward import score
from lit_rl.ops.masking import masked_mean, masked_sum
from lit_rl.ops.reductions import StepTotals
from lit_rl.rollout import PER_TOKEN, Completions, Rollout, Sampling, select, trim

_RESPONSE = ("response_ids", "response_mask", "sampler_logprobs", "kept_logmass", "attended", "turn")


def trimmed(completions: Completions) -> tuple[Completions, slice]:
    """Without the columns that are padding in every row, and the response columns that are left."""
    prompt, response = trim(completions)
    columns: dict[str, slice] = {"prompt_ids": prompt, "prompt_mask": prompt}
    columns |= dict.fromkeys(_RESPONSE, response)
    values: dict[str, Any] = {name: getattr(completions, name) for name in columns}
    changes = {name: value if value is None else value[:, columns[name]] for name, value in values.items()}
    return dataclasses.replace(completions, **changes), response


def trimmed_rollout(rollout: Rollout) -> Rollout:
    """Without the columns that are padding in every row."""
    completions, columns = trimmed(rollout.completions)
    values = {name: getattr(rollout, name) for name in PER_TOKEN}
    cut = {name: value[:, columns] for name, value in values.items() if value is not None and value.ndim == 2}
    return dataclasses.replace(rollout, completions=completions, **cut)


def micro_batch(rollout: Rollout, plan: BatchPlan, *, slot: int, seed: int, index: int) -> Rollout:
    """The rows of slot `slot` of rollout number `index`, trimmed."""
    at, group_id = Slot.of(slot, plan), rollout.completions.group_id
    rows = minibatch_rows(group_id, plan, seed, index, at.iteration)[at.minibatch]
    chosen = micro_rows(rows, group_id, rollout.completions.lengths, plan)[at.micro]
    return trimmed_rollout(select(rollout, chosen))


COUNTS = ("sequences", "tokens", "unmasked_sequences", "token_weights", "sequence_weights")
"""Columns of `step_counts`: rows, loss tokens, rows that have one, the sum of weights over loss tokens, and the sum
over rows of the mean weight of their loss tokens. A row that was left out (`algo.groups`) has neither a reward nor a
loss token, and is none of the rows."""


def step_counts(rollout: Rollout, plan: BatchPlan, *, seed: int, index: int) -> Tensor:
    """Float64 `(optimizer steps, 5)`: what each step of the rollout counts, over all ranks. See `COUNTS`."""
    mask, group_id = rollout.loss_mask, rollout.completions.group_id
    weights = torch.ones(mask.shape, device=mask.device) if rollout.weights is None else rollout.weights
    rows_in_use = mask.any(1) | ~rollout.rewards.isnan()
    columns = [rows_in_use, mask.sum(1), mask.any(1), masked_sum(weights, mask, 1), masked_mean(weights, mask, 1)]
    per_row = torch.stack([column.double() for column in columns], dim=1)
    counts = torch.stack(
        [
            per_row[rows].sum(0)
            for iteration in range(plan.iterations)
            for rows in minibatch_rows(group_id, plan, seed, index, iteration)
        ]
    )
    if plan.world_size > 1:
        torch.distributed.all_reduce(counts)
    return counts


def totals_of(counts: Tensor, plan: BatchPlan) -> StepTotals:
    """The totals of one step, from its row of `step_counts`."""
    sequences, tokens, unmasked = counts[:3].float().unbind()
    return StepTotals(sequences, tokens, unmasked, plan.accumulate * plan.world_size)


@torch.no_grad()
def frozen_logprobs(model: nn.Module, completions: Completions, *, sampling: Sampling, rows_at_once: int) -> Tensor:
    """`(b, t)` without gradient, `rows_at_once` rows at a time; the model in evaluation mode, its mode restored."""
    ids = completions.response_ids
    out = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    was_training = model.training
    model.eval()
    try:
        for chunk in torch.arange(len(completions), device=out.device).split(rows_at_once):
            part, columns = trimmed(select(completions, chunk))
            out[chunk, columns] = score(model, part, sampling).logprobs
    finally:
        model.train(was_training)
    return out
