"""Rows of a data set whose completions are written anew: their prompts, and micro-batches with other completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.core.examples import ExampleBatch, TokenBatch, Totals
from lit_rl.core.rollout import Completions, PromptBatch


def prompts_to_rewrite(micro_batches: Sequence[ExampleBatch], ranks: Ranks) -> PromptBatch:
    """Return the prompts of this rank's part of a step: the tokens of each text before the first learned one.

    A collective: a row that is twice in a step gets two samples, whichever ranks have it.
    """
    prompt_ids = []
    for micro in micro_batches:
        first = torch.where(micro.tokens.loss_mask.any(1), micro.tokens.loss_mask.int().argmax(1), 1)
        rows = micro.tokens.input_ids.tolist()
        prompt_ids += [row[:length] for row, length in zip(rows, first.tolist())]
    mine = [row for micro in micro_batches for row in micro.rows]
    return PromptBatch(
        prompts=[""] * len(mine),
        prompt_ids=prompt_ids,
        columns={},
        rows=mine,
        occurrences=_occurrences(mine, ranks),
        rollout=micro_batches[0].step,
    )


def _occurrences(mine: Sequence[int], ranks: Ranks) -> list[int]:
    """Count the earlier occurrences of each of our rows, on lower ranks, then on this one."""
    rows = ranks.gather(torch.tensor(mine)).tolist()
    seen: Counter[int] = Counter(rows[: ranks.rank * len(mine)])
    counts = []
    for row in mine:
        counts.append(seen[row])
        seen[row] += 1
    return counts


def with_completions(
    micro_batches: Sequence[ExampleBatch], completions: Completions, ranks: Ranks
) -> tuple[ExampleBatch, ...]:
    """Return the micro-batches of this rank's part of a step with new completions, the only learned tokens.

    A collective.

    Args:
        micro_batches: The micro-batches of the data, `n` rows.
        completions: Completions of their prompts, `n` rows in the same order.
        ranks: The ranks over which the new `totals` of the step are counted.
    """
    ids, attended, learned = as_tokens(completions, ranks.device)
    rows = [len(micro) for micro in micro_batches]
    parts = []
    for part in zip(*(field.split(rows) for field in (ids, attended, learned))):
        width = max(2, int(part[1].any(0).sum()))  # without columns that are padding in every row
        parts.append(TokenBatch(*(field[:, :width] for field in part)))
    of_all = ranks.gather(torch.stack([learned.sum(1), attended.sum(1)], 1)).tolist()
    old, tokens, texts = micro_batches[0].totals, sum(row[0] for row in of_all), tuple(row[1] for row in of_all)
    totals = Totals(old.rows, tokens, sum(texts), old.shares, texts=texts, learned=tokens)
    return tuple(
        replace(micro, tokens=part, totals=totals, whole=()) for micro, part in zip(micro_batches, parts, strict=True)
    )


def as_tokens(completions: Completions, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """Return `input_ids`, `attention_mask` and `loss_mask` `(b, s)` of prompts with completions, right-padded."""
    ids = torch.cat([completions.prompt_ids, completions.response_ids], 1)
    attended = completions.attention_mask
    learned = F.pad(completions.response_mask, (completions.prompt_ids.shape[1], 0))
    order = (~attended).int().argsort(dim=1, stable=True)
    return tuple(field.gather(1, order).to(device) for field in (ids, attended, learned))  # pyright: ignore
