"""Tells of responses that are finished while others are still written (`Prompts.on_finished`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lit_rl.generation.batches import Decoded
from lit_rl.generation.responses import Responses

OnFinished = Callable[[int, list[int]], None]
"""Is called with a row of the completions and its tokens."""


class FinishedRows:
    """Rows of one turn, each told once.

    Args:
        on_finished: Is told.
        responses: Where the rows are written.
    """

    def __init__(self, on_finished: OnFinished, responses: Responses) -> None:
        self._on_finished, self._responses = on_finished, responses
        self._told = torch.zeros_like(responses.ended)

    def tell(self, rows: Tensor, running: Tensor) -> None:
        """Tell of those of these rows, long ``(m,)``, that do not go on, bool ``(m,)``, and were not told before."""
        new = rows[~running & ~self._told[rows]]
        self._told[new] = True
        for row in new.tolist():
            self._on_finished(row, self._responses.text(row))


def tell_batch(on_finished: OnFinished | None, rows: Tensor, decoded: Decoded) -> None:
    """Tell of a batch, all of whose rows are finished."""
    if on_finished is None:
        return
    for row, ids, mask in zip(rows.tolist(), decoded.ids, decoded.mask):
        on_finished(row, ids[mask].tolist())


def tell_group(on_finished: OnFinished | None, number: int, answers: Sequence[list[int]], group_size: int) -> None:
    """Tell of what an engine answered to a prompt: a greedy answer stands for the whole group."""
    if on_finished is None:
        return
    for sample in range(group_size):
        on_finished(number * group_size + sample, answers[sample % len(answers)])
