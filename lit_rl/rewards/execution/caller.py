"""How one reward function is called: where, with which limits, from which cache, and what a failure means."""

from __future__ import annotations

import asyncio
import itertools
import threading
import warnings
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from lit_rl.errors import ConfigError
from lit_rl.process_state import mixed, process_kept
from lit_rl.rewards.completion import Completion
from lit_rl.rewards.execution.cache import Cache, key_of
from lit_rl.rewards.execution.early import EarlyCalls, in_order, is_independent
from lit_rl.rewards.execution.event_loops import (
    BESIDE_LOOP,
    FUNCTION_LOOP,
    WORKER_LOOP,
    BackgroundLoop,
    run_without_loop,
)
from lit_rl.rewards.execution.failures import call_error, warn_of_failures
from lit_rl.rewards.execution.result import FunctionScores
from lit_rl.rewards.execution.settings import CallSettings
from lit_rl.rewards.execution.worker_pool import WorkerPool
from lit_rl.rewards.functions.by_path import FunctionFromPath, is_async
from lit_rl.rewards.functions.contract import (
    Function,
    argument_names,
    check_rows,
    check_value,
    is_per_sample,
    keywords,
    takes,
)
from lit_rl.rewards.functions.names import check_metrics
from lit_rl.rewards.workers.job import (
    SERVICES,
    CallFailed,
    Failure,
    Job,
    Outcome,
    TrainerState,
    n_completions,
    run,
    run_async,
)

MAX_HANGS = 8
"""Completions of one batch that may each run into the limit alone; those after them are failures without a try."""

GRACE = 5.0
"""Seconds after its cancellation in which a coroutine that does not block is gone."""

_PLURAL = {"prompt": "prompts", "completion": "completions"}


Early = tuple[EarlyCalls, Collection[int]]
"""Calls that began before the batch was complete, and the rows for which they are valid."""


class Caller:
    """One reward function under its settings.

    Args:
        name: Its name in messages and metrics.
        function: Runs in a worker process if it is a `FunctionFromPath`, else in this process.
        settings: Limits and failure policy.
    """

    def __init__(self, name: str, function: Function, settings: CallSettings) -> None:
        self.name, self.function, self.settings = name, function, settings
        self.pool: WorkerPool | None = None
        if isinstance(function, FunctionFromPath) and settings.workers:
            self.pool = WorkerPool(function, settings.workers, settings.memory_mb, settings.recycle_after)
        self._reset()

    def _reset(self) -> None:
        self._cache = Cache(self.settings.cache) if self.settings.cache else None
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def bind(self, columns: Sequence[str]) -> list[str]:
        """Choose the arguments to call it with; see `contract.keywords`."""
        wanted = keywords(self.name, self.function, columns)
        if self._cache is not None and "trainer_state" in argument_names(self.name, self.function):
            raise ConfigError(
                f"reward.cache={self.settings.cache}: reward function {self.name!r} takes trainer_state, so its value "
                "is not the same for the same completion. Set reward.cache=0."
            )
        return wanted

    @property
    def logs_metrics(self) -> bool:
        """True if the function gets ``log_metric``."""
        return takes(self.name, self.function, "log_metric")

    def job(self, inputs: Mapping[str, Sequence[Any] | None], rows: int, state: TrainerState) -> Job:
        """Return the job of a call, made of all columns under their plural names."""
        standard = ("prompts", "completions", "completion_ids")
        wanted = self.bind([key for key in inputs if key not in standard])
        per_sample = is_per_sample(self.name, self.function)
        plural = _PLURAL if per_sample else {}
        return Job(
            numbers=range(rows),
            inputs={key: inputs[plural.get(key, key)] for key in wanted if key not in SERVICES},
            services=tuple(key for key in wanted if key in SERVICES),
            trainer_state=state,
            per_sample=per_sample,
            catch=self.settings.on_error is not None,
            max_concurrent=self.settings.max_concurrent,
            seed=None if state.seed is None else mixed(state.seed, self.name),
        )

    def early(self, job: Job, completions: Sequence[Completion]) -> EarlyCalls | None:
        """Return calls for rows that are finished while others are generated; None if the function has to see the
        batch.

        It has to where a value may depend on other rows, as of any function that takes a list; where a sync function of
        this process does not allow a thread; where it logs a number per call; and where a cache counts its hits.

        Args:
            job: All rows of the batch. Missing completions are put into its inputs before a row is told.
            completions: The same of the completions, for messages.
        """
        runs_elsewhere = self.pool is not None or is_async(self.function)
        allowed = is_independent(self.function) or (job.per_sample and runs_elsewhere)
        if not allowed or (self.logs_metrics and not job.per_sample) or self._cache is not None:
            return None
        return EarlyCalls(
            job,
            lambda part: self._run_or_retry_rows(part, completions),
            self._loop,
            at_once=self._concurrency,
            all_that_wait=not job.per_sample,
            most_hangs=MAX_HANGS,
        )

    @property
    def _loop(self) -> BackgroundLoop:
        """The event loop on which it runs, if it does not run on the calling thread."""
        if self.pool is not None:
            return WORKER_LOOP
        return FUNCTION_LOOP if is_async(self.function) else BESIDE_LOOP

    def begin(
        self, job: Job, completions: Sequence[Completion], early: Early | None = None
    ) -> Future[FunctionScores] | None:
        """Start it in the background, if it runs on a loop there; else None, and `result` does the work.

        Args:
            job: Rows of the batch.
            completions: Of the whole batch.
            early: Calls that were begun before the batch was whole, and the rows that they are right for.
        """
        if early is None and self.pool is None and not is_async(self.function):
            return None
        return self._loop.submit(self._score(job, completions, early))

    def result(
        self, job: Job, completions: Sequence[Completion], begun: Future[FunctionScores] | None
    ) -> FunctionScores:
        """Wait for the call that `begin` started, or call the function on this thread."""
        scores = begun.result() if begun is not None else run_without_loop(self._score(job, completions))
        of_job = [completions[number] for number in job.numbers]
        warn_of_failures(self.name, scores.failures, of_job, self.settings, self._warned)
        return scores

    # ---------------------------------------------------------------- one batch; suspends only where it runs on a loop

    async def _score(self, job: Job, completions: Sequence[Completion], early: Early | None = None) -> FunctionScores:
        if early is not None:
            return self._check(job, await self._run_what_is_left(job, completions, *early), completions)
        if self._cache is None:
            return self._check(job, await self._run_in_parts(job, completions), completions)
        keys = [key_of(job.row(i)) for i in range(job.rows)]
        known = {key: self._cache.get(key) for key in keys}  # held here: new entries may push old ones out
        first = {key: i for i, key in reversed(list(enumerate(keys))) if known[key] is None}
        missing = sorted(first.values())
        fresh = FunctionScores([], [], [])
        if missing:
            part = job.select(missing)
            fresh = self._check(part, await self._run_in_parts(part, completions), completions)
        for place, i in enumerate(missing):
            known[keys[i]] = fresh.entry(place)
            if fresh.failures[place] is None:
                self._cache.put(keys[i], fresh.entry(place))
        return FunctionScores.from_entries([known[key] for key in keys], fresh, cache_hits=job.rows - len(missing))

    def _check(self, job: Job, outcome: Outcome, completions: Sequence[Completion]) -> FunctionScores:
        """Return values, spans and failures of an outcome whose rows are counted."""
        check_metrics(self.name, outcome.metrics)
        result = FunctionScores([], [], [], outcome.metrics, outcome.extras, outcome.output)
        for i, value in zip(job.numbers, outcome.returned, strict=True):
            failure = value if isinstance(value, Failure) else None
            score = self.settings.on_error if failure else value
            number, spans = check_value(self.name, i, score, completions[i])
            result.values.append(number)
            result.spans.append(spans)
            result.failures.append(failure)
        return result

    async def _run_what_is_left(
        self, job: Job, completions: Sequence[Completion], calls: EarlyCalls, rows: Collection[int]
    ) -> Outcome:
        """Run the job for all rows that early calls did not score."""
        parts = await calls.parts(rows)
        known = {number for numbers, _ in parts for number in numbers}
        left = job.select([place for place, number in enumerate(job.numbers) if number not in known])
        if left.rows:
            parts.append((left.numbers, await self._run_in_parts(left, completions, hangs=calls.hangs)))
        return in_order(parts, job.numbers)

    async def _run_in_parts(self, job: Job, completions: Sequence[Completion], hangs: int = 0) -> Outcome:
        """Run the whole job; a per-sample one in as many parts as there are workers."""
        parts = min(self.settings.workers, job.rows) if self.pool is not None and job.per_sample else 1
        bounds = [job.rows * part // max(1, parts) for part in range(max(1, parts) + 1)]
        slices = [job.select(range(start, end)) for start, end in itertools.pairwise(bounds)]
        each = [partial(self._run_or_retry_rows, part, completions, hangs) for part in slices]
        done = await _gather(each, len(slices))
        return Outcome.concatenate(done, [part.rows for part in slices])

    async def _run_or_retry_rows(self, job: Job, completions: Sequence[Completion], hangs: int = 0) -> Outcome:
        """Run the job; if it fails and failures have a score, run each completion alone, so that only some fail.

        `hangs` completions of its batch have reached the time limit before.

        So many of its batch have run into the limit before.
        """
        try:
            return await self._run(job)
        except CallFailed as failed:
            if self.settings.on_error is None or isinstance(failed.__cause__, ConfigError):  # wrong for every row
                raise call_error(self.name, failed, job.rows, completions, self.settings) from failed.__cause__
            if job.rows == 1:
                return Outcome([failed.failure], output=failed.failure.output)

        async def alone(row: int) -> Outcome:
            nonlocal hangs
            if hangs >= MAX_HANGS:
                text = f"not tried after {hangs} others of its batch had run into the limit"
                return Outcome([Failure("TimeoutError", text, timed_out=True)])
            try:
                return await self._run(job.select([row]))
            except CallFailed as failed:
                hangs += failed.failure.timed_out
                return Outcome([failed.failure], output=failed.failure.output)

        done = await _gather([partial(alone, row) for row in range(job.rows)], self._concurrency)
        return Outcome.concatenate(done, [1] * job.rows)

    @property
    def _concurrency(self) -> int:
        if self.pool is not None:
            return self.settings.workers
        return self.settings.max_concurrent if is_async(self.function) else 1

    async def _run(self, job: Job) -> Outcome:
        """Run one call, within the time limit if there can be one; its rows are counted."""
        limit = self.settings.timeout
        if self.pool is not None:
            outcome = await self.pool.call(job, limit)
        elif is_async(self.function):
            outcome = await self._run_awaited(job, limit)
        else:
            with self._warn_when_late(limit):
                outcome = self._run_here(job)
        check_rows(self.name, outcome.returned, job.rows)
        return outcome

    def _run_here(self, job: Job) -> Outcome:
        """Run it on this thread. The training's random draws are unaffected by it."""
        if job.seed is None or threading.current_thread() is not threading.main_thread():
            return run(self.function, replace(job, seed=None), FUNCTION_LOOP.wait)
        with process_kept(f"reward function {self.name!r}"):
            return run(self.function, job, FUNCTION_LOOP.wait)

    async def _run_awaited(self, job: Job, limit: float | None) -> Outcome:
        with self._warn_when_late(None if limit is None else limit + GRACE):
            try:
                async with asyncio.timeout(limit):
                    return await run_async(self.function, replace(job, seed=None))  # the training draws beside it
            except TimeoutError:
                text = f"more than {limit:g} seconds for {n_completions(job.rows)}"
                raise CallFailed(Failure("TimeoutError", text, timed_out=True)) from None

    @contextmanager
    def _warn_when_late(self, seconds: float | None) -> Iterator[None]:
        """Warn of a call in this process that takes longer; nothing can end it."""
        if seconds is None:
            yield
            return

        def warn() -> None:
            warnings.warn(
                f"reward function {self.name!r} has been running for more than timeout={self.settings.timeout:g} "
                "seconds. It runs in the training process, where it cannot be stopped: name it by path "
                "(reward=function reward.fn=./file.py:name) to have it killed at the limit.",
                stacklevel=1,
            )

        timer = threading.Timer(seconds, warn)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


async def _gather(functions: Sequence[Callable[[], Coroutine[Any, Any, Outcome]]], at_once: int) -> list[Outcome]:
    """Return the results of the functions, in their order; `at_once` of them run at a time, and the first error ends
    all.

    One at a time needs no loop.
    """
    if at_once <= 1 or len(functions) == 1:
        return [await function() for function in functions]
    gate = asyncio.Semaphore(at_once)

    async def gated(function: Callable[[], Coroutine[Any, Any, Outcome]]) -> Outcome:
        async with gate:
            return await function()

    tasks = [asyncio.ensure_future(gated(function)) for function in functions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
