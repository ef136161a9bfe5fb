"""Scored rollouts, before any credit is assigned; callbacks see them, and groups are selected from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_rl.rewards.sums.weighted import Scores
from lit_rl.rollout import Completions, PromptBatch, join_completions, select


@dataclass(frozen=True)
class Scored:
    """Prompts with completions and their scores. Completions of a prompt are neighbours."""

    batch: PromptBatch
    completions: Completions
    scores: Scores
    kept: Tensor | None = None
    """Bool `(b,)`: rows that are learned from. None: all."""
    greedy_rewards: Tensor | None = None
    """Float32 `(b,)`: reward of the greedy completion of each row's prompt. None where no advantage needs it."""
    win_rates: Tensor | None = None
    """Float64 `(b,)` on the CPU: win rate of each completion against the others of its prompt, by a judge; NaN without
    a verdict. None without a judge."""

    @property
    def group_size(self) -> int:
        return len(self.completions) // len(self.batch)

    def prompts(self, which: list[int]) -> Scored:
        """Return the given prompts, in that order, with all their completions."""
        rows = (torch.tensor(which)[:, None] * self.group_size + torch.arange(self.group_size)).flatten()
        return Scored(_prompts_of(self.batch, which), select(self.completions, rows), scores_of(self.scores, rows))

    def followed_by(self, more: Scored) -> Scored:
        """Return the prompts of both, these first; their completions get one width."""
        return Scored(
            _join_batches(self.batch, more.batch),
            join_completions(self.completions, more.completions),
            _join_scores(self.scores, more.scores),
        )


def scores_of(scores: Scores, rows: Tensor) -> Scores:
    """Return the scores of the given rows; logged metrics are those of all rows."""
    indices, rows = rows.tolist(), rows.to(scores.total.device)
    spans = scores.span_rewards
    return dataclasses.replace(
        scores,
        values=scores.values[rows],
        total=scores.total[rows],
        weights=scores.weights[rows],
        extras={name: [values[i] for i in indices] for name, values in scores.extras.items()},
        span_rewards=None if spans is None else [spans[i] for i in indices],
    )


def _prompts_of(batch: PromptBatch, which: list[int]) -> PromptBatch:
    return dataclasses.replace(
        batch,
        prompts=[batch.prompts[i] for i in which],
        prompt_ids=[batch.prompt_ids[i] for i in which],
        columns={name: [values[i] for i in which] for name, values in batch.columns.items()},
        rows=[batch.rows[i] for i in which],
        occurrences=[batch.occurrences[i] for i in which],
    )


def _join_batches(one: PromptBatch, two: PromptBatch) -> PromptBatch:
    return dataclasses.replace(
        one,
        prompts=[*one.prompts, *two.prompts],
        prompt_ids=[*one.prompt_ids, *two.prompt_ids],
        columns={name: [*values, *two.columns[name]] for name, values in one.columns.items()},
        rows=[*one.rows, *two.rows],
        occurrences=[*one.occurrences, *two.occurrences],
    )


def _join_scores(one: Scores, two: Scores) -> Scores:
    metrics = dict(one.metrics)
    for name, (total, count) in two.metrics.items():
        before = metrics.get(name, (0.0, 0))
        metrics[name] = (before[0] + total, before[1] + count)
    spans = None
    if one.span_rewards is not None or two.span_rewards is not None:
        spans = [*(one.span_rewards or [[]] * len(one.total)), *(two.span_rewards or [[]] * len(two.total))]
    missing = [None] * len(one.total), [None] * len(two.total)
    names = {**one.extras, **two.extras}
    extras = {name: [*one.extras.get(name, missing[0]), *two.extras.get(name, missing[1])] for name in names}
    return dataclasses.replace(
        one,
        values=torch.cat([one.values, two.values]),
        total=torch.cat([one.total, two.total]),
        weights=torch.cat([one.weights, two.weights]),
        metrics=metrics,
        extras=extras,
        span_rewards=spans,
    )
