"""Reports of finished responses while others are still written (`Prompts.on_finished`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lit_rl.generation.batches import Decoded
from lit_rl.generation.responses import Look, Responses

OnFinished = Callable[[int, list[int]], None]
"""A function of a row of the completions and its tokens."""


class FinishedRows:
    """Rows of one turn, each reported once.

    Args:
        on_finished: Called for each row.
        responses: The responses of the rows.
    """

    def __init__(self, on_finished: OnFinished, responses: Responses) -> None:
        self._on_finished, self._responses = on_finished, responses
        self._told: set[int] = set()

    def tell(self, look: Look) -> None:
        """Report those of these rows that are finished, and were not reported before."""
        new = [row for row, runs in zip(look.rows, look.running, strict=True) if not runs and row not in self._told]
        self._told.update(new)
        for row, ids in zip(new, self._responses.texts(new) if new else (), strict=True):
            self._on_finished(row, ids)


def tell_batch(on_finished: OnFinished | None, rows: Tensor, decoded: Decoded) -> None:
    """Report a batch, all of whose rows are finished."""
    if on_finished is None:
        return
    for row, ids, mask in zip(rows.tolist(), decoded.ids, decoded.mask):
        on_finished(row, ids[mask].tolist())


def tell_group(on_finished: OnFinished | None, number: int, answers: Sequence[list[int]], group_size: int) -> None:
    """Report an engine's answers to a prompt: a greedy answer stands for the whole group."""
    if on_finished is None:
        return
    for sample in range(group_size):
        on_finished(number * group_size + sample, answers[sample % len(answers)])
