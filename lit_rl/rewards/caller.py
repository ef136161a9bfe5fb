"""Calls of one reward function: where it runs, its limits, its cache, early calls, and what a failure means.

`Caller` runs a `Job` and returns `FunctionScores`: in a `WorkerPool`, on an event loop, or on the calling thread, under
`CallSettings`. Results of equal inputs come from its `ScoreCache`. `EarlyCalls` score completions that are finished
while others are still generated; the call of the whole batch takes their outcomes over.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import pickle
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from lit_rl.core.errors import ConfigError, LitRLError, RewardError
from lit_rl.core.event_loops import BESIDE_LOOP, FUNCTION_LOOP, WORKER_LOOP, BackgroundLoop, run_without_loop
from lit_rl.core.process_state import mix_seed, preserve_process_state
from lit_rl.rewards.contract import (
    Completion,
    Function,
    FunctionFromPath,
    Part,
    argument_names,
    check_metric_names,
    check_rows,
    check_value,
    is_async,
    is_per_sample,
    keywords,
    takes,
    text_of,
)
from lit_rl.rewards.jobs import (
    OBJECTS,
    SERVICES,
    CallFailed,
    Failure,
    Job,
    Outcome,
    TrainerState,
    ends_the_run,
    n_completions,
    run,
    run_async,
)
from lit_rl.rewards.workers import WorkerPool, quote_output


@dataclass(frozen=True)
class CallSettings:
    """The settings of `Rewards` for calls of its functions; its docstring explains each of them."""

    on_error: float | None
    timeout: float | None
    workers: int
    memory_mb: int | None
    recycle_after: int
    max_concurrent: int
    cache: int

    def __post_init__(self) -> None:
        if self.on_error is not None and not (isinstance(self.on_error, int | float) and math.isfinite(self.on_error)):
            raise ConfigError(f"reward.on_error={self.on_error!r} must be a finite number, or null to end the run.")


@dataclass
class FunctionScores:
    """The scores of one function for ``b`` completions."""

    values: list[float]
    """NaN where it does not apply."""
    spans: list[list[Part] | None]
    failures: list[Failure | None]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    output: str = ""
    cache_hits: int = 0
    """Completions that the cache knew."""

    def entry(self, i: int) -> tuple[float, list[Part] | None, Failure | None, dict[str, Any]]:
        """Return the result for one completion, in the form that a cache keeps."""
        extras = {column: values[i] for column, values in self.extras.items()}
        return self.values[i], self.spans[i], self.failures[i], extras

    @classmethod
    def from_entries(cls, entries: Sequence[Any], fresh: FunctionScores, cache_hits: int) -> FunctionScores:
        """Concatenate entries; metrics and output are those of the call that made the fresh ones."""
        columns = dict.fromkeys(column for *_, extras in entries for column in extras)
        return cls(
            values=[value for value, _, _, _ in entries],
            spans=[spans for _, spans, _, _ in entries],
            failures=[failure for _, _, failure, _ in entries],
            metrics=fresh.metrics,
            extras={column: [extras.get(column) for *_, extras in entries] for column in columns},
            output=fresh.output,
            cache_hits=cache_hits,
        )


class ScoreCache:
    """An LRU cache of one function's results by its inputs.

    Args:
        size: Entries that are kept.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._entries: OrderedDict[bytes, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Any:
        """Return the entry, or None."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: bytes, entry: Any) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        if len(self._entries) > self.size:
            self._entries.popitem(last=False)


def key_of(inputs: Mapping[str, Any]) -> bytes:
    """Return a digest of one completion's inputs: equal for equal texts, numbers, lists and dicts; types count."""
    return hashlib.blake2b(repr(_frozen(dict(inputs))).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _frozen(value: Any) -> Any:
    """Return the value as nested tuples of texts and numbers, whose repr determines it."""
    if value is None or type(value) in (str, int, float, bool, bytes):
        return value
    if isinstance(value, dict):
        return (
            "dict",
            *sorted(((repr(_frozen(key)), _frozen(item)) for key, item in value.items()), key=lambda p: p[0]),
        )
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_frozen(item) for item in value))
    return (type(value).__name__, pickle.dumps(value))


class WorkerTraceback(Exception):
    """The traceback of a worker process, as text: the cause of a RewardError."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def call_error(
    name: str, failed: CallFailed, rows: int, completions: Sequence[Completion], settings: CallSettings
) -> LitRLError:
    """Return the error that ends a run after a failed call for `rows` completions. A LitRLError keeps its class."""
    failure = failed.failure
    if failed.__cause__ is None and failure.trace:
        failed.__cause__ = WorkerTraceback(failure.trace)
    when = f"while it scored {n_completions(rows)}"
    if failure.row is not None:
        when = f"while it scored completion {failure.row}, which starts {text_of(completions[failure.row])[:80]!r}"
    score = "reward.on_error=0 would score such completions instead of ending the run."
    if failure.timed_out:
        return RewardError(
            f"reward function {name!r} took {failure.text}{quote_output(failure.output)}. Give it longer with "
            f"reward.timeout (now {settings.timeout:g} seconds a batch), or look for an endless loop. {score}"
        )
    limit = f" Its process may take {settings.memory_mb} MiB (reward.memory_mb)." if settings.memory_mb else ""
    if failure.died:
        return RewardError(
            f"the worker process of reward function {name!r} {failure.text} "
            f"{when}{quote_output(failure.output)}.{limit} {score}"
        )
    place = f" ({failure.place})" if failure.place else ""
    memory = limit if failure.kind == "MemoryError" else ""
    cause = failed.__cause__
    kind = type(cause) if isinstance(cause, LitRLError) else RewardError
    said = f"{failure.text}{place}{quote_output(failure.output)}"
    end = "" if said.endswith((".", "?")) else "."
    return kind(f"reward function {name!r} raised {failure.kind} {when}: {said}{end}{memory}")


RowsOutcome = tuple[Sequence[int], Outcome]
"""Rows of a batch, and the outcome of a call for them, in their order."""


class EarlyCalls:
    """Calls of a function for rows as they are finished, whose outcomes the call of the whole batch takes over.

    If failures end the run, only successes are kept: a row whose call failed is scored again with the rest, so that a
    failure has the same message and consequences as without early calls. If failures have a score (``on_error``), they
    count at once.

    Args:
        job: All rows of the batch, whose inputs are filled as they become known.
        call: Calls the function with some of them.
        loop: The event loop of the calls.
        at_once: Calls under way at a time.
        all_that_wait: Whether a call gets all rows that wait at its start, or one of them.
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
        self._done: list[RowsOutcome] = []

    def tell(self, row: int) -> None:
        """Begin to score a row whose completion is in the job now."""
        self._waiting.append(row)
        self._begun.append(self._loop.submit(self._next()))

    def cancel(self) -> None:
        """Cancel the calls, as nobody waits for them any longer."""
        for future in self._begun:
            future.cancel()

    async def parts(self, rows: Collection[int]) -> list[RowsOutcome]:
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


def in_order(parts: Sequence[RowsOutcome], rows: Sequence[int]) -> Outcome:
    """Return parts that cover each of these rows once as the outcome of one call, with the rows in this order."""
    whole = Outcome.concatenate([outcome for _, outcome in parts], [len(numbers) for numbers, _ in parts])
    place = {number: i for i, number in enumerate(number for numbers, _ in parts for number in numbers)}
    order = [place[row] for row in rows]
    extras = {column: [values[i] for i in order] for column, values in whole.extras.items()}
    return Outcome([whole.returned[i] for i in order], whole.metrics, extras, whole.output)


MAX_HANGS = 8
"""Completions of one batch that may each run into the limit alone; those after them are failures without a try."""

GRACE = 5.0
"""Seconds after its cancellation in which a coroutine that does not block is gone."""

_PLURAL = {"prompt": "prompts", "completion": "completions"}

GROUPS = "*group_ids"
"""Key of the groups of a rollout among the inputs. No column: no function can name it."""


EarlyRows = tuple[EarlyCalls, Collection[int]]
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
        self._cache = ScoreCache(self.settings.cache) if self.settings.cache else None
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def bind(self, columns: Sequence[str]) -> list[str]:
        """Choose the arguments to call it with; see `contract.keywords`. In a worker process it gets no objects."""
        columns = [name for name in columns if self.pool is None or name != OBJECTS]
        wanted = keywords(self.name, self.function, columns)
        if self._cache is not None and "trainer_state" in argument_names(self.name, self.function):
            raise ConfigError(
                f"reward.cache={self.settings.cache}: reward function {self.name!r} takes trainer_state, so its value "
                "is not the same for the same completion. Set reward.cache=0."
            )
        if self._cache is not None and self.compares_rows:
            raise ConfigError(
                f"reward.cache={self.settings.cache}: reward function {self.name!r} compares the completions of a "
                "prompt, and a cache would hide some of them from it. Set reward.cache=0."
            )
        return wanted

    @property
    def compares_rows(self) -> bool:
        """True if a value depends on the other completions of its prompt, so that none is scored alone."""
        return getattr(_inner(self.function), "compares_rows", False) is True

    @property
    def is_centred(self) -> bool:
        """True if the mean of the values over the completions of a prompt is 0 by construction."""
        return getattr(_inner(self.function), "is_centred", False) is True

    @property
    def measures_length(self) -> bool:
        """True if it says so: its values tell how long a completion is, and not whether it is right."""
        return getattr(_inner(self.function), "measures_length", False) is True

    @cached_property
    def _is_async(self) -> bool:
        return is_async(self.function)

    @property
    def logs_metrics(self) -> bool:
        """True if the function gets ``log_metric``."""
        return takes(self.name, self.function, "log_metric")

    def job(self, inputs: Mapping[str, Sequence[Any] | None], rows: int, state: TrainerState) -> Job:
        """Return the job of a call, made of all columns under their plural names."""
        standard = ("prompts", "completions", "completion_ids", GROUPS)
        wanted = self.bind([key for key in inputs if key not in standard])
        per_sample = is_per_sample(self.name, self.function)
        plural = _PLURAL if per_sample else {}
        given = {key: inputs[plural.get(key, key)] for key in wanted if key not in SERVICES}
        if self.compares_rows and "group_ids" in argument_names(self.name, self.function):
            given["group_ids"] = inputs.get(GROUPS)
        return Job(
            numbers=range(rows),
            inputs=given,
            services=tuple(key for key in wanted if key in SERVICES),
            trainer_state=state,
            per_sample=per_sample,
            catch=self.settings.on_error is not None,
            max_concurrent=self.settings.max_concurrent,
            seed=None if state.seed is None else mix_seed(state.seed, self.name),
        )

    def early(self, job: Job, completions: Sequence[Completion]) -> EarlyCalls | None:
        """Return calls for rows that are finished while others are generated; None if the function has to see the
        batch.

        It has to where a value may depend on other rows, as of any function that takes a list; where a sync function of
        this process does not allow a thread; where it logs a number per call; and where a cache counts its hits.

        Args:
            job: All rows of the batch. Missing completions are put into its inputs before `tell` is called for a row.
            completions: The same of the completions, for messages.
        """
        runs_elsewhere = self.pool is not None or self._is_async
        # Its value for a completion then depends on that completion, its prompt and columns alone: it may be called
        # with some of the rows of a batch, in a thread of its own, while other rows are still generated.
        is_independent = getattr(_inner(self.function), "independent_rows", False) is True
        allowed = is_independent or (job.per_sample and runs_elsewhere)
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
        return FUNCTION_LOOP if self._is_async else BESIDE_LOOP

    def begin(
        self, job: Job, completions: Sequence[Completion], early: EarlyRows | None = None
    ) -> Future[FunctionScores] | None:
        """Start it in the background, if it runs on a loop there; else None, and `result` does the work.

        Args:
            job: Rows of the batch.
            completions: Of the whole batch.
            early: Calls that began before the batch was complete, and the rows for which they are valid.
        """
        if early is None and self.pool is None and not self._is_async:
            return None
        return self._loop.submit(self._score(job, completions, early))

    def result(
        self, job: Job, completions: Sequence[Completion], begun: Future[FunctionScores] | None
    ) -> FunctionScores:
        """Wait for the call that `begin` started, or call the function on this thread."""
        scores = begun.result() if begun is not None else run_without_loop(self._score(job, completions))
        failed = [(number, each) for number, each in zip(job.numbers, scores.failures, strict=True) if each is not None]
        for number, failure in failed:  # one warning for each kind, with the first completion that it happened on
            if failure.kind in self._warned:
                continue
            self._warned.add(failure.kind)
            place = f" ({failure.place})" if failure.place else ""
            warnings.warn(
                f"reward function {self.name!r} failed on {len(failed)} of {len(scores.failures)} completions, which "
                f"score on_error={self.settings.on_error:g}: {failure.kind}: {failure.text}{place}"
                f"{quote_output(failure.output)}. The first starts {text_of(completions[number])[:80]!r}. Later ones "
                f"of this kind are counted in rewards/{self.name}/failure_ratio only.",
                stacklevel=3,
            )
        return scores

    # ---------------------------------------------------------------- one batch; suspends only where it runs on a loop

    async def _score(
        self, job: Job, completions: Sequence[Completion], early: EarlyRows | None = None
    ) -> FunctionScores:
        if early is not None:
            calls, rows = early
            parts = await calls.parts(rows)
            known_rows = {number for numbers, _ in parts for number in numbers}
            left = job.select([place for place, number in enumerate(job.numbers) if number not in known_rows])
            if left.rows:
                parts.append((left.numbers, await self._run_in_parts(left, completions, hangs=calls.hangs)))
            return self._check(job, in_order(parts, job.numbers), completions)
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
        check_metric_names(self.name, outcome.metrics)
        result = FunctionScores([], [], [], outcome.metrics, outcome.extras, outcome.output)
        for i, value in zip(job.numbers, outcome.returned, strict=True):
            failure = value if isinstance(value, Failure) else None
            score = self.settings.on_error if failure else value
            number, spans = check_value(self.name, i, score, completions[i])
            result.values.append(number)
            result.spans.append(spans)
            result.failures.append(failure)
        return result

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

        Args:
            job: Rows of the batch.
            completions: Of the whole batch.
            hangs: Completions of the batch that have reached the time limit before.
        """
        try:
            return await self._run(job)
        except CallFailed as failed:
            if self.settings.on_error is None or ends_the_run(failed.__cause__):
                raise call_error(self.name, failed, job.rows, completions, self.settings) from failed.__cause__
            if job.rows == 1 or self.compares_rows:
                return Outcome([failed.failure] * job.rows, output=failed.failure.output)

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
        return self.settings.max_concurrent if self._is_async else 1

    async def _run(self, job: Job) -> Outcome:
        """Run one call, within the time limit if there can be one; its rows are counted."""
        limit = self.settings.timeout
        if self.pool is not None:
            outcome = await self.pool.call(job, limit)
        elif self._is_async:
            with self._warn_when_late(None if limit is None else limit + GRACE):
                try:
                    async with asyncio.timeout(limit):  # it is not seeded: the training draws beside it
                        outcome = await run_async(self.function, replace(job, seed=None))
                except TimeoutError:
                    text = f"more than {limit:g} seconds for {n_completions(job.rows)}"
                    raise CallFailed(Failure("TimeoutError", text, timed_out=True)) from None
        else:
            in_main = threading.current_thread() is threading.main_thread()
            seeded = job if in_main else replace(job, seed=None)
            keep_state = nullcontext()
            if seeded.seed is not None:
                keep_state = preserve_process_state(f"reward function {self.name!r}")
            with self._warn_when_late(limit), keep_state:
                outcome = run(self.function, seeded, FUNCTION_LOOP.wait)
        check_rows(self.name, outcome.returned, job.rows)
        return outcome

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


def _inner(function: Function) -> Function:
    return function.function if isinstance(function, FunctionFromPath) else function


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
