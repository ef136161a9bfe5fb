"""Micro-batches of a rollout by slot, the counts that their losses divide by, and scoring without gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.rollouts.plan import BatchPlan, mix
from lit_rl.models.policy.forward import TokenScores, response_logprobs
from lit_rl.models.policy.modes import evaluation_mode
from lit_rl.models.policy.options import DEFAULT, ForwardOptions
from lit_rl.ops.masking import masked_mean, masked_sum
from lit_rl.ops.mismatch import WeightTotals
from lit_rl.ops.reductions import StepTotals
from lit_rl.rollout import Completions, Rollout, Sampling, Width, select, trim, trim_rollout, used_columns
from lit_rl.transfers import to_device


def minibatch_rows(group_id: Tensor, plan: BatchPlan, seed: int, rollout: int, iteration: int) -> list[Tensor]:
    """Return the rows of each mini-batch of a pass: whole groups, permuted by (seed, rollout, iteration).

    `group_id` and the rows are in the host's memory.
    """
    groups = torch.unique(group_id)
    if plan.minibatches > 1:
        generator = torch.Generator().manual_seed(mix(seed, rollout, iteration))
        groups = groups[torch.randperm(len(groups), generator=generator)]
    return [torch.isin(group_id, part).nonzero().flatten() for part in groups.chunk(plan.minibatches)]


def micro_rows(rows: Tensor, group_id: Tensor, lengths: Tensor, plan: BatchPlan) -> list[Tensor]:
    """Cut a mini-batch into `accumulate` micro-batches of equally many group slices, balanced by tokens.

    Slices are dealt from long to short, back and forth, so that no micro-batch gets all the long ones.
    """
    if plan.accumulate == 1:
        return [rows]
    slices = [
        part
        for group in torch.unique(group_id[rows])
        for part in rows[group_id[rows] == group].chunk(plan.split_groups)
    ]
    slices.sort(key=lambda part: (-int(lengths[part].sum()), int(part[0])))
    hands: list[list[Tensor]] = [[] for _ in range(plan.accumulate)]
    for i, part in enumerate(slices):
        lap, seat = divmod(i, plan.accumulate)
        hands[seat if lap % 2 == 0 else plan.accumulate - 1 - seat].append(part)
    return [torch.cat(hand).sort().values for hand in hands]


class RowCounts(NamedTuple):
    """Token counts of the rows of a rollout, on the host: long ``(b,)`` each."""

    group: Tensor
    prompt: Tensor
    """Tokens of the prompt."""
    read: Tensor
    """Tokens after the prompt that a model reads."""
    sampled: Tensor
    """Tokens among these that the policy sampled."""

    @classmethod
    def of(cls, rollout: Rollout) -> RowCounts:
        """Count the tokens of a rollout, in its copy on the host."""
        host = rollout.completions.on_host
        return cls(host.group_id, host.prompt_mask.sum(1), host.read_lengths, host.lengths)


def rows_of_slots(
    rollout: Rollout, plan: BatchPlan, *, seed: int, index: int, teaching: Tensor | None = None
) -> list[Tensor]:
    """Return the rows of each slot of rollout number `index`, in the host's memory; see `deal_rows`."""
    return deal_rows(RowCounts.of(rollout), plan, seed=seed, index=index, teaching=teaching)


def deal_rows(
    counts: RowCounts, plan: BatchPlan, *, seed: int, index: int, teaching: Tensor | None = None
) -> list[Tensor]:
    """Return the rows of each slot of rollout number `index`, in the host's memory.

    Slots are ordered pass by pass, mini-batch by mini-batch, micro-batch by micro-batch.

    Args:
        counts: Counts of the rollout.
        plan: The plan of the run.
        seed: The seed of the run.
        index: Number of the rollout since the start of the run.
        teaching: Bool `(b,)`: rows with a gradient. The others are left out, and micro-batches are balanced by the
            tokens of the remaining ones. A slot keeps at least one row: all ranks take equally many forward and
            backward passes. None: all rows.
    """
    group_id, lengths = counts.group, counts.read
    teaching = None if teaching is None else teaching.cpu()
    computed = lengths if teaching is None else lengths * teaching
    slots = [
        part
        for iteration in range(plan.iterations)
        for rows in minibatch_rows(group_id, plan, seed, index, iteration)
        for part in micro_rows(rows, group_id, computed, plan)
    ]
    return slots if teaching is None else [_teaching(rows, teaching, lengths) for rows in slots]


def _teaching(rows: Tensor, teaching: Tensor, lengths: Tensor) -> Tensor:
    """Return the rows that teach; the shortest row if none does."""
    chosen = rows[teaching[rows]]
    return chosen if len(chosen) else rows[lengths[rows].argmin()][None]


def micro_batch(rollout: Rollout, rows: Tensor, used: Mapping[Width, slice] | None = None) -> Rollout:
    """Return these rows of a rollout, trimmed to the longest, or to the `used` columns where these are known."""
    return trim_rollout(select(rollout, rows), used)


COUNTS = ("sequences", "tokens", "unmasked_sequences", "token_weights", "sequence_weights", "better_tokens")
"""Columns of `step_counts`: rows, loss tokens, rows that have one, the sum of weights over loss tokens, the sum over
rows of the mean weight of their loss tokens, and loss tokens of rows that a judge found better. A row that was left out
(`algo.groups`) has neither a reward nor a loss token, and is not counted."""


def step_counts(
    rollout: Rollout,
    plan: BatchPlan,
    *,
    seed: int,
    index: int,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> Tensor:
    """Return float64 `(optimizer steps, 6)`: the counts of each step of the rollout, over all ranks. See `COUNTS`."""
    mask, group_id = rollout.loss_mask, rollout.completions.on_host.group_id
    weights = torch.ones(mask.shape, device=mask.device) if rollout.weights is None else rollout.weights
    rows_in_use, tokens = mask.any(1) | ~rollout.rewards.isnan(), mask.sum(1)
    better = torch.zeros_like(tokens) if rollout.verdicts is None else tokens * (rollout.verdicts > 0)
    weight_sums = masked_sum(weights, mask, 1), masked_mean(weights, mask, 1)
    columns = [rows_in_use, tokens, mask.any(1), *weight_sums, better]
    per_row = torch.stack([column.double() for column in columns], dim=1)
    counts = torch.stack(
        [
            per_row[to_device(rows, mask.device)].sum(0)
            for iteration in range(plan.iterations)
            for rows in minibatch_rows(group_id, plan, seed, index, iteration)
        ]
    )
    return ranks.all_reduce(counts, "SUM")


def totals_of(counts: Tensor, plan: BatchPlan) -> StepTotals:
    """Return the totals of one step, from its row of `step_counts`."""
    sequences, tokens, unmasked, token_weights, sequence_weights, better_tokens = counts.float().unbind()
    return StepTotals(
        sequences,
        tokens,
        unmasked,
        plan.accumulate * plan.world_size,
        weights=WeightTotals(tokens, unmasked, token_weights, sequence_weights),
        better_tokens=better_tokens,
    )


@dataclass(frozen=True)
class SeenRows:
    """Rows that were learned from, with the policy's scores of their tokens then, without gradient."""

    rows: Tensor
    """Long `(m,)`, in the host's memory: row numbers in the rollout."""
    scores: TokenScores
    """Scores of these rows, as wide as the longest of them."""

    @classmethod
    def of(cls, rows: Tensor, scores: TokenScores) -> SeenRows:
        """Return the rows of a micro-batch, once its loss is computed."""
        per_token = {"logprobs": scores.logprobs, "entropy": scores.entropy, "values": scores.values}
        kept = {name: values if values is None else values.detach() for name, values in per_token.items()}
        return cls(rows, replace(scores, aux_loss=None, **kept))


@torch.no_grad()
def without_gradient(
    model: nn.Module, completions: Completions, of_rows: Callable[[Completions], Tensor], *, rows_at_once: int
) -> Tensor:
    """Return `(b, t)` float32: `of_rows` of `rows_at_once` rows at a time, with the model in evaluation mode."""
    ids, completions = completions.response_ids, completions.with_host()
    out = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    with evaluation_mode(model):
        for start in range(0, len(completions), rows_at_once):
            end = min(start + rows_at_once, len(completions))
            part = select(completions, torch.arange(start, end))
            out[start:end, used_columns(part)[Width.RESPONSE]] = of_rows(trim(part))
    return out


def frozen_logprobs(
    model: nn.Module,
    completions: Completions,
    *,
    sampling: Sampling,
    rows_at_once: int,
    options: ForwardOptions = DEFAULT,
) -> Tensor:
    """Return `(b, t)`: log-probs of the response tokens under a model, without gradient."""
    return without_gradient(
        model, completions, lambda part: response_logprobs(model, part, sampling, options), rows_at_once=rows_at_once
    )
