"""Putting parts of several scored batches together: the same prompts in batch, completions and scores."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_rl.rewards.sums.weighted import Scores
from lit_rl.rollout import Completions, PromptBatch, select

_PROMPT = ("prompt_ids", "prompt_mask")

Part = tuple[PromptBatch, Completions, Scores]


def joined(first: Part, second: Part) -> Part:
    """The prompts of both, and their completions: of the same widths, the first's prompts before the second's."""
    (batch, completions, scores), (more, others, their_scores) = first, second
    return _join_batches(batch, more), join_completions(completions, others), _join_scores(scores, their_scores)


def take_rows(batch: PromptBatch, completions: Completions, scores: Scores, prompts: list[int]) -> Part:
    """The given prompts, in that order, with all their completions."""
    group = len(completions) // len(batch)
    rows = (torch.tensor(prompts)[:, None] * group + torch.arange(group)).flatten()
    picked = dataclasses.replace(
        batch,
        prompts=[batch.prompts[i] for i in prompts],
        prompt_ids=[batch.prompt_ids[i] for i in prompts],
        columns={name: [values[i] for i in prompts] for name, values in batch.columns.items()},
        rows=[batch.rows[i] for i in prompts],
        occurrences=[batch.occurrences[i] for i in prompts],
    )
    indices = rows.tolist()
    spans = scores.span_rewards
    chosen = dataclasses.replace(
        scores,
        values=scores.values[rows],
        total=scores.total[rows],
        weights=scores.weights[rows],
        extras={name: [values[i] for i in indices] for name, values in scores.extras.items()},
        span_rewards=None if spans is None else [spans[i] for i in indices],
    )
    return picked, select(completions, rows), chosen


def join_completions(first: Completions, second: Completions) -> Completions:
    """Rows of both; `version` is the first's."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(first):
        one, two = getattr(first, field.name), getattr(second, field.name)
        if field.name == "kept_logmass" and (one is None or two is None):
            values[field.name] = None  # told of some rows only
        elif isinstance(one, Tensor):
            values[field.name] = torch.cat(padded(field.name, one, two))
        elif isinstance(one, dict):
            values[field.name] = {key: torch.cat([one[key], two[key]]) for key in one}
    return dataclasses.replace(first, **values)


def padded(name: str, one: Tensor, two: Tensor) -> list[Tensor]:
    """Both as wide as the wider one: prompts are padded on the left, everything else on the right.

    Token ids are padded by 0: what stands outside the masks is never read.
    """
    if one.ndim < 2:
        return [one, two]
    width = max(one.shape[1], two.shape[1])
    missing = [width - part.shape[1] for part in (one, two)]
    pads = [(count, 0) if name in _PROMPT else (0, count) for count in missing]
    return [F.pad(part, pad) for part, pad in zip((one, two), pads)]


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
