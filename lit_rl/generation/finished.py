"""Tells of responses that are over while others are still written (`Prompts.over`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lit_rl.generation.batches import Decoded
from lit_rl.generation.responses import Responses

Over = Callable[[int, list[int]], None]
"""Is called with a row of the completions and its tokens."""


class OverRows:
    """Rows of one turn, each told once.

    Args:
        over: Is told.
        responses: Where the rows are written.
    """

    def __init__(self, over: Over, responses: Responses) -> None:
        self._over, self._responses = over, responses
        self._told = torch.zeros_like(responses.ended)

    def tell(self, rows: Tensor, running: Tensor) -> None:
        """Tell of those of these rows, long ``(m,)``, that do not go on, bool ``(m,)``, and were not told before."""
        new = rows[~running & ~self._told[rows]]
        self._told[new] = True
        for row in new.tolist():
            self._over(row, self._responses.text(row))


def tell_batch(over: Over | None, rows: Tensor, decoded: Decoded) -> None:
    """Tell of a batch, all of whose rows are over."""
    if over is None:
        return
    for row, ids, mask in zip(rows.tolist(), decoded.ids, decoded.mask):
        over(row, ids[mask].tolist())


def tell_group(over: Over | None, number: int, answers: Sequence[list[int]], group_size: int) -> None:
    """Tell of what an engine answered to a prompt: a greedy answer stands for the whole group."""
    if over is None:
        return
    for sample in range(group_size):
        over(number * group_size + sample, answers[sample % len(answers)])
