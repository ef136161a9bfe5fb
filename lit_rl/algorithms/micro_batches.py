"""From a rollout to the micro-batch of one slot, and the counts that its loss divides by."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.algorithms.batching import BatchPlan, Slot, micro_rows, minibatch_rows
from lit_rl.models.forward import token_logprobs
from lit_rl.rollout import Completions, Rollout, select, trim


def trimmed(completions: Completions) -> tuple[Completions, slice]:
    """Without the columns that are padding in every row, and the response columns that are left."""
    prompt, response = trim(completions)
    columns: dict[str, slice] = {"prompt_ids": prompt, "prompt_mask": prompt}
    columns |= dict.fromkeys(("response_ids", "response_mask", "sampler_logprobs", "attended", "turn"), response)
    values: dict[str, Any] = {name: getattr(completions, name) for name in columns}
    changes = {name: value if value is None else value[:, columns[name]] for name, value in values.items()}
    return dataclasses.replace(completions, **changes), response


def micro_batch(rollout: Rollout, plan: BatchPlan, *, slot: int, seed: int, index: int) -> Rollout:
    """The rows of slot `slot` of rollout number `index`, trimmed."""
    at, group_id = Slot.of(slot, plan), rollout.completions.group_id
    rows = minibatch_rows(group_id, plan, seed, index, at.iteration)[at.minibatch]
    micro = select(rollout, micro_rows(rows, group_id, rollout.completions.lengths, plan)[at.micro])
    completions, columns = trimmed(micro.completions)
    per_token = {name: getattr(micro, name) for name in ("loss_mask", "old_logprobs", "ref_logprobs")}
    cut = {name: value[:, columns] for name, value in per_token.items() if value is not None}
    return dataclasses.replace(micro, completions=completions, **cut)


def step_totals(rollout: Rollout, plan: BatchPlan, *, seed: int, index: int) -> Tensor:
    """Float64 `(optimizer steps, 2)`: sequences and loss tokens of each step of the rollout, over all ranks."""
    group_id = rollout.completions.group_id
    counts = [
        [len(rows), int(rollout.loss_mask[rows].sum())]
        for iteration in range(plan.iterations)
        for rows in minibatch_rows(group_id, plan, seed, index, iteration)
    ]
    totals = torch.tensor(counts, dtype=torch.float64, device=group_id.device)
    if plan.world_size > 1:
        torch.distributed.all_reduce(totals)
    return totals


@torch.no_grad()
def frozen_logprobs(model: nn.Module, completions: Completions, *, temperature: float, rows_at_once: int) -> Tensor:
    """`(b, t)` without gradient, `rows_at_once` rows at a time; the model in evaluation mode, its mode restored."""
    ids = completions.response_ids
    out = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    was_training = model.training
    model.eval()
    for chunk in torch.arange(len(completions), device=out.device).split(rows_at_once):
        part, columns = trimmed(select(completions, chunk))
        out[chunk, columns] = token_logprobs(model, part, temperature=temperature)[0]
    model.train(was_training)
    return out
