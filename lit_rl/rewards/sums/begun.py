"""The rewards of a batch whose completions come one by one: functions that can, are asked as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.rewards.completion import Completion
from lit_rl.rewards.execution.caller import Caller, Early
from lit_rl.rewards.execution.early import EarlyCalls
from lit_rl.rewards.workers.job import TrainerState


class BegunRewards:
    """Early calls of several functions.

    Args:
        callers: Of each function, by name.
        inputs: Prompts and columns of the whole batch, under their plural names, one value a completion.
        rows: Those that each function scores.
        state: Where the run is.
    """

    def __init__(
        self,
        callers: Mapping[str, Caller],
        inputs: Mapping[str, Sequence[Any]],
        rows: Mapping[str, Sequence[int]],
        state: TrainerState,
    ) -> None:
        count = len(inputs["prompts"])
        self._rows = {name: frozenset(of_function) for name, of_function in rows.items()}
        self._completions: list[Any] = [None] * count
        self._ids: list[Any] = [None] * count
        written = {**inputs, "completions": self._completions, "completion_ids": self._ids}
        calls = {
            name: caller.early(caller.job(written, count, state), self._completions) for name, caller in callers.items()
        }
        self._calls: dict[str, EarlyCalls] = {name: each for name, each in calls.items() if each is not None}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def tell(self, row: int, completion: Completion, completion_ids: Sequence[int]) -> None:
        """Record a finished completion and begin to score it. Once a row; a second one for the same row is ignored."""
        if self._completions[row] is not None:
            return
        self._completions[row], self._ids[row] = completion, list(completion_ids)
        for name, calls in self._calls.items():
            if row in self._rows[name]:
                calls.tell(row)

    def of(self, completions: Sequence[Completion], completion_ids: Sequence[Sequence[int]]) -> dict[str, Early]:
        """Return the early calls of each function, and the recorded rows that are unchanged in the batch."""
        told = zip(self._completions, self._ids, completions, completion_ids, strict=True)
        same = {row for row, (text, ids, now, ids_now) in enumerate(told) if text == now and ids == list(ids_now)}
        return {name: (calls, same) for name, calls in self._calls.items()}

    def cancel(self) -> None:
        """Cancel the calls, as nobody waits for them any longer."""
        for calls in self._calls.values():
            calls.cancel()
