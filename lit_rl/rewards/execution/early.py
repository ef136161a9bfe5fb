"""Calls of one reward function for completions that are over while others are still written."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from lit_rl.rewards.execution.event_loops import BackgroundLoop
from lit_rl.rewards.functions.by_path import FunctionFromPath
from lit_rl.rewards.workers.job import Failure, Job, Outcome

Part = tuple[Sequence[int], Outcome]
"""Rows of a batch, and the outcome of a call for them, in their order."""


def is_independent(function: Any) -> bool:
    """Tell whether a function has an attribute ``independent_rows`` that is True.

    Its value for a completion then depends on that completion, its prompt and columns alone: it may be called with
    some of the rows of a batch, in a thread of its own, while other rows are still written.
    """
    inner = function.function if isinstance(function, FunctionFromPath) else function
    return getattr(inner, "independent_rows", False) is True


class EarlyCalls:
    """Calls of a function for rows as they are finished, whose outcomes the call of the whole batch takes over.

    Where failures end the run, only success is kept: a row whose call failed is asked about again with all that is
    left, so that a failure has the words and the consequences that it has without early calls. Where they have a score
    (``on_error``), a failure counts at once.

    Args:
        job: All rows of the batch, whose inputs are filled as they become known.
        call: Calls the function with some of them.
        loop: Where.
        at_once: Calls under way at a time.
        all_that_wait: Whether a call has all rows that wait by then; otherwise one.
        most_hangs: Rows that may run into the limit before the rest is left to the call of the batch.
    """

    def __init__(
        self,
        job: Job,
        call: Callable[[Job], Awaitable[Outcome]],
        loop: BackgroundLoop,
        *,
        at_once: int,
        all_that_wait: bool,
        most_hangs: int,
    ) -> None:
        self._job, self._call, self._loop = job, call, loop
        self._all_that_wait, self._hangs_left = all_that_wait, most_hangs
        self.hangs = 0
        """Completions that ran into the limit."""
        self._gate = asyncio.Semaphore(at_once)
        self._waiting: deque[int] = deque()
        self._begun: list[Future[None]] = []
        self._done: list[Part] = []

    def tell(self, row: int) -> None:
        """Begin to score a row whose completion is in the job now."""
        self._waiting.append(row)
        self._begun.append(self._loop.submit(self._next()))

    def cancel(self) -> None:
        """Cancel the calls, as nobody waits for them any longer."""
        for future in self._begun:
            future.cancel()

    async def parts(self, rows: Collection[int]) -> list[Part]:
        """Return the outcomes for these rows once no call is under way: the parts that have no other row."""
        await asyncio.gather(*map(asyncio.wrap_future, self._begun))
        return sorted((part for part in self._done if set(part[0]) <= set(rows)), key=lambda part: part[0][0])

    async def _next(self) -> None:
        async with self._gate:
            if not self._waiting or self._hangs_left <= 0:
                return
            rows = [self._waiting.popleft()]
            while self._all_that_wait and self._waiting:
                rows.append(self._waiting.popleft())
            try:
                outcome = await self._call(self._job.select(rows))
            except Exception:
                self._hangs_left = 0  # the rest is scored with the batch
                return
            hangs = sum(isinstance(value, Failure) and value.timed_out for value in outcome.returned)
            self.hangs, self._hangs_left = self.hangs + hangs, self._hangs_left - hangs
            self._done.append((rows, outcome))


def in_order(parts: Sequence[Part], rows: Sequence[int]) -> Outcome:
    """Return parts that cover each of these rows once as the outcome of one call, with the rows in this order."""
    whole = Outcome.concatenate([outcome for _, outcome in parts], [len(numbers) for numbers, _ in parts])
    place = {number: i for i, number in enumerate(number for numbers, _ in parts for number in numbers)}
    order = [place[row] for row in rows]
    extras = {column: [values[i] for i in order] for column, values in whole.extras.items()}
    return Outcome([whole.returned[i] for i in order], whole.metrics, extras, whole.output)
