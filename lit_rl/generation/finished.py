"""Tells of responses that are finished while others are still written (`Prompts.on_finished`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lit_rl.generation.batches import Decoded
from lit_rl.generation.responses import Look, Responses

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
        self._told: set[int] = set()

    def tell(self, look: Look) -> None:
        """Tell of those of these rows that do not go on, and were not told before."""
        new = [row for row, runs in zip(look.rows, look.running, strict=True) if not runs and row not in self._told]
        self._told.update(new)
        for row, ids in zip(new, self._responses.texts(new) if new else (), strict=True):
            self._on_finished(row, ids)


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
