"""Batch arithmetic: how a rollout or rows of a data set become optimizer steps and micro-batches.

`BatchPlan` and `OfflinePlan` have the numbers of a run (docs/batch-arithmetic.md). From a rollout they lead to the rows
of each micro-batch (`deal_rows`) and to the counts that its loss divides by (`step_counts`). `without_gradient` scores
completions in parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.core.branches import tokens_read
from lit_rl.core.errors import ConfigError, in_range
from lit_rl.core.rollout import Completions, Rollout, Sampling, Width, select, trim, trim_rollout, used_columns
from lit_rl.core.transfers import to_device
from lit_rl.models.forward import TokenScores, response_logprobs, score
from lit_rl.models.language_model import DEFAULT, ForwardOptions
from lit_rl.models.modes import evaluation_mode
from lit_rl.ops.reductions import StepTotals, WeightTotals, masked_mean, masked_sum

# ---------------------------------------------------------------------- plans


@dataclass(frozen=True)
class BatchPlan:
    """The batch sizes of a run with rollouts. All are global (over every rank) unless the name says otherwise.

    Ranks have prompts of their own, whole groups. Where the prompts do not divide over the ranks, `ranks_per_group`
    neighbours have the same prompts, and each completes an equal share of every group.
    """

    prompts_per_rollout: int
    group_size: int
    minibatches: int
    iterations: int
    accumulate: int
    world_size: int
    split_groups: int = 1
    max_new_tokens: int = 1
    why: str = ""
    """The reason for `accumulate`, where the memory plan chose it."""

    def __post_init__(self) -> None:
        for key, value in self._keys().items():
            in_range(key, value, low=1)
        if self.group_size % self.split_groups:
            raise ConfigError(
                f"algo.split_groups={self.split_groups} does not divide algo.group_size={self.group_size}: "
                "every slice of a group must have the same number of rows."
            )
        if not self._divides(self.prompts_per_rollout, self.minibatches, self.accumulate):
            raise ConfigError(self._explain())

    def _keys(self) -> dict[str, int]:
        return {
            "data.prompts_per_rollout": self.prompts_per_rollout,
            "algo.group_size": self.group_size,
            "algo.minibatches": self.minibatches,
            "algo.iterations": self.iterations,
            "trainer.accumulate_grad_batches": self.accumulate,
            "data-parallel size": self.world_size,
            "algo.split_groups": self.split_groups,
        }

    def _sharing(self, prompts: int, minibatches: int) -> int | None:
        """Return the fewest ranks per group for which mini-batches hold whole groups; None if there are none."""
        for sharing in range(1, self.world_size + 1):
            per_rank, left = divmod(prompts * sharing, self.world_size)
            whole = not (self.world_size % sharing or left) and per_rank and per_rank % minibatches == 0
            if whole and self.group_size % (sharing * self.split_groups) == 0:
                return sharing
        return None

    def _divides(self, prompts: int, minibatches: int, accumulate: int) -> bool:
        """Tell whether mini-batches hold whole groups, and micro-batches whole slices of a rank's shares of them."""
        sharing = self._sharing(prompts, minibatches)
        if sharing is None:
            return False
        return (prompts * sharing // self.world_size // minibatches * self.split_groups) % accumulate == 0

    def _explain(self) -> str:
        """Return the message: the equation, the settings, and the three nearest that work."""
        want = (self.prompts_per_rollout, self.minibatches, self.accumulate)
        near = sorted(
            (
                (abs(p - want[0]) / want[0] + 2 * abs(m - want[1]) / want[1] + 2 * abs(a - want[2]) / want[2], p, m, a)
                for p, m, a in product(
                    range(1, 2 * want[0] + want[1] * want[2] * self.world_size + 1),
                    range(1, want[1] + 1),
                    range(1, want[2] + 1),
                )
                if self._divides(p, m, a)
            ),
        )[:3]
        lines = [
            f"  data.prompts_per_rollout={p} algo.minibatches={m} trainer.accumulate_grad_batches={a}"
            for _, p, m, a in near
        ]
        slices = f" (each group cut into {self.split_groups} slices)" if self.split_groups > 1 else ""
        return (
            f"data.prompts_per_rollout={want[0]} must be divisible by algo.minibatches={want[1]} x "
            f"trainer.accumulate_grad_batches={want[2]} x data-parallel size {self.world_size}{slices}, "
            f"so that every micro-batch holds whole groups{self._explain_sharing()}. Nearest settings that work:\n"
            + "\n".join(lines)
        )

    def _explain_sharing(self) -> str:
        if self.world_size == 1:
            return ""
        return f"; or algo.group_size={self.group_size} by a number of ranks that share the prompts evenly"

    @property
    def ranks_per_group(self) -> int:
        """Ranks that complete the same prompts, each an equal share of every group; 1 where groups are whole."""
        return self._sharing(self.prompts_per_rollout, self.minibatches) or 1

    @property
    def prompts_per_rank(self) -> int:
        """Prompts of a rollout that a rank completes, alone or together with others."""
        return self.prompts_per_rollout * self.ranks_per_group // self.world_size

    @property
    def slots(self) -> int:
        """Micro-batches of a rollout (R of the design)."""
        return self.iterations * self.minibatches * self.accumulate

    @property
    def units(self) -> int:
        """Slices of groups of a rank in an optimizer step, of which micro-batches are made."""
        return self.prompts_per_rank // self.minibatches * self.split_groups

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps of a rollout."""
        return self.iterations * self.minibatches

    @property
    def completions(self) -> int:
        """Completions of a rollout, over all ranks."""
        return self.prompts_per_rollout * self.group_size

    def table(self) -> list[tuple[str, str]]:
        """Return the batch arithmetic as rows of a table."""
        per_step = self.completions // self.minibatches
        micro = per_step // self.accumulate // self.world_size
        shared = self.ranks_per_group
        share = f"{self.group_size // shared} of {self.group_size}, as {shared} ranks share a prompt"
        return [
            ("prompts per rollout", f"{self.prompts_per_rollout}"),
            *([("completions per prompt and rank", share)] if shared > 1 else []),
            ("completions per rollout", f"{self.completions} = {self.prompts_per_rollout} x {self.group_size}"),
            ("tokens per rollout, at most", f"{self.completions * self.max_new_tokens:,}"),
            ("optimizer steps per rollout", f"{self.steps_per_rollout} = {self.iterations} x {self.minibatches}"),
            ("completions per optimizer step", f"{per_step}"),
            ("completions per micro-batch and rank", f"{micro}"),
            *([("micro-batches per optimizer step", self.why)] if self.why else []),
        ]


def mix(*parts: int) -> int:
    """Return a seed made of several numbers, the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True)
class OfflinePlan:
    """The batch sizes of a run on a data set. All are global (over every rank)."""

    batch_size: int
    """Rows of an optimizer step."""
    accumulate: int
    world_size: int
    rows: int
    """Training rows that are used; for a stream, in its first window."""
    stream_buffer: int | None = None
    """Rows of a stream in memory at a time; None where all are."""
    why: str = ""
    """The reason for `accumulate`, where the memory plan chose it."""

    def __post_init__(self) -> None:
        in_range("trainer.accumulate_grad_batches", self.accumulate, low=1)
        parts = self.accumulate * self.world_size
        if self.batch_size % parts:
            below = self.batch_size // parts * parts
            near = [f"data.batch_size={size}" for size in (below, below + parts) if size]
            raise ConfigError(
                f"data.batch_size={self.batch_size} must be divisible by trainer.accumulate_grad_batches="
                f"{self.accumulate} x data-parallel size {self.world_size}: every micro-batch has as many rows. "
                f"Nearest that work: {', '.join(near)}."
            )

    def table(self) -> list[tuple[str, str]]:
        """Return the batch arithmetic as rows of a table."""
        steps, left = divmod(self.rows, self.batch_size)
        per_step = [
            ("rows per optimizer step", f"{self.batch_size}"),
            ("rows per micro-batch and rank", f"{self.batch_size // self.accumulate // self.world_size}"),
            *([("micro-batches per optimizer step", self.why)] if self.why else []),
        ]
        if self.stream_buffer is not None:
            return [
                ("rows in memory at a time", f"{self.stream_buffer:,} ({self.rows:,} left of the first)"),
                *per_step,
            ]
        return [
            ("training rows", f"{self.rows:,}"),
            *per_step,
            ("optimizer steps per epoch", f"{steps:,}" + (f" ({left} rows are left for other epochs)" if left else "")),
        ]


# ---------------------------------------------------------------------- micro-batches


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
    """Tokens after the prompt that a model reads, those of several branches once in each."""
    sampled: Tensor
    """Tokens among these that the policy sampled."""

    @classmethod
    def of(cls, rollout: Rollout) -> RowCounts:
        """Count the tokens of a rollout, in its copy on the host."""
        host = rollout.completions.on_host
        read = host.read_lengths if host.follows is None else tokens_read(host)
        return cls(host.group_id, host.prompt_mask.sum(1), read, host.lengths)


class Dealt(NamedTuple):
    """A rollout that is dealt out over its slots."""

    rollout: Rollout
    rows: list[Tensor]
    """Rows of each slot."""
    used: list[dict[Width, slice]]
    """The columns that the rows of each slot use."""
    teaching: Tensor | None
    """Bool `(b,)`: the rows with a gradient. None: all."""


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
    if teaching is None:
        return slots
    # The rows that teach; the shortest row if none does.
    return [rows[teaching[rows]] if teaching[rows].any() else rows[lengths[rows].argmin()][None] for rows in slots]


def micro_batch(rollout: Rollout, rows: Tensor, used: Mapping[Width, slice] | None = None) -> Rollout:
    """Return these rows of a rollout, trimmed to the longest, or to the `used` columns where these are known."""
    return trim_rollout(select(rollout, rows), used)


# ---------------------------------------------------------------------- counts of a step


COUNTS = (
    *("sequences", "tokens", "unmasked_sequences", "token_weights", "sequence_weights", "better_tokens"),
    "observed_tokens",
)
"""Columns of `step_counts`: rows, loss tokens, rows that have one, the sum of weights over loss tokens, the sum over
rows of the mean weight of their loss tokens, loss tokens of rows that a judge found better, and tokens that an
environment wrote in rows with a loss token. A row that was left out (`algo.groups`) has neither a reward nor a loss
token, and is not counted."""


def step_counts(
    rollout: Rollout,
    plan: BatchPlan,
    *,
    seed: int,
    index: int,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> Tensor:
    """Return float64 `(optimizer steps, 7)`: the counts of each step of the rollout, over all ranks. See `COUNTS`."""
    mask, group_id = rollout.loss_mask, rollout.completions.on_host.group_id
    weights = torch.ones(mask.shape, device=mask.device) if rollout.weights is None else rollout.weights
    rows_in_use, tokens = mask.any(1) | ~rollout.rewards.isnan(), mask.sum(1)
    better = torch.zeros_like(tokens) if rollout.verdicts is None else tokens * (rollout.verdicts > 0)
    weight_sums = masked_sum(weights, mask, 1), masked_mean(weights, mask, 1)
    observed = torch.zeros_like(tokens)
    if rollout.completions.attended is not None:  # of several turns
        observed = (rollout.completions.observed & mask.any(1, keepdim=True)).sum(1)
    columns = [rows_in_use, tokens, mask.any(1), *weight_sums, better, observed]
    per_row = torch.stack([column.double() for column in columns], dim=1)
    counts = torch.stack(
        [
            per_row[to_device(rows, mask.device)].sum(0)
            for iteration in range(plan.iterations)
            for rows in minibatch_rows(group_id, plan, seed, index, iteration)
        ]
    )
    return ranks.all_reduce(counts, "SUM")


def step_totals(counts: Tensor, plan: BatchPlan) -> StepTotals:
    """Return the totals of one step, from its row of `step_counts`."""
    sequences, tokens, unmasked, token_weights, sequence_weights, better, observed = counts.float().unbind()
    return StepTotals(
        sequences,
        tokens,
        unmasked,
        plan.accumulate * plan.world_size,
        weights=WeightTotals(tokens, unmasked, token_weights, sequence_weights),
        better_tokens=better,
        observed_tokens=observed,
    )


# ---------------------------------------------------------------------- scores


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
    model: nn.Module, completions: Completions, of_rows: Callable[..., Tensor], *columns: Tensor, rows_at_once: int
) -> Tensor:
    """Return `(b, t)` or `(b, t, k)`, float32: `of_rows` of `rows_at_once` rows at a time, with the model in evaluation
    mode. It gets the completions, and the same rows and tokens of the `columns`, `(b, t, ...)` each."""
    ids, completions = completions.response_ids, completions.with_host()
    out = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    with evaluation_mode(model):
        for start in range(0, len(completions), rows_at_once):
            end = min(start + rows_at_once, len(completions))
            part = select(completions, torch.arange(start, end))
            used = used_columns(part)[Width.RESPONSE]
            found = of_rows(trim(part), *(column[start:end, used] for column in columns))
            out = out if start else out.new_zeros(*ids.shape, *found.shape[2:])
            out[start:end, used] = found
    return out


def with_gradient_norms(
    model: nn.Module,
    completions: Completions,
    *,
    sampling: Sampling,
    rows_at_once: int,
    options: ForwardOptions = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Return `(b, t)` each: `frozen_logprobs`, and the squared norm of the gradient of each log-prob by the logits.

    That is `1 - 2 p + sum_v p_v^2`, with the probabilities of the sampled distribution, at its temperature.
    """

    def of_rows(part: Completions) -> Tensor:
        scores = score(model, part, sampling, stats=True, options=options)
        assert scores.stats is not None
        norms = 1 - 2 * scores.logprobs.exp() + scores.stats.log_sum_sq.exp()
        return torch.stack([scores.logprobs, norms.clamp(min=0)], -1)

    logprobs, norms = without_gradient(model, completions, of_rows, rows_at_once=rows_at_once).unbind(-1)
    return logprobs.contiguous(), norms.contiguous()


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
