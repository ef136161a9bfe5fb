"""A runner of environments' calls, each with a time limit, in a thread of its own."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from typing import Any

from lit_rl.core.event_loops import BackgroundLoop
from lit_rl.core.process_state import preserve_process_state, seed_generators

GRACE = 1.0
"""Seconds beyond its limit in which what awaits is cancelled. What still runs then blocks its thread."""


class NoReply(Exception):
    """An environment gave none, by no fault of the policy: the episode fails."""


class TimedOut(NoReply):
    """The error for a call that exceeded its time limit."""


class CallContext:
    """The context of the current call of an environment, available to everything that it calls.

    Args:
        seconds: Time limit. A worker counts it from when it begins, for each call.
        until: Absolute deadline, by `time.perf_counter`.
        seed: Seed of the global random generators, in [0, 2^32).
        alone: True if nothing else runs meanwhile, so that this process's generators are seeded.
    """

    def __init__(self, seconds: float, seed: int, *, until: float = math.inf, alone: bool) -> None:
        self.seconds, self.seed, self.until, self.alone = seconds, seed, until, alone
        self._calls = 0
        if alone:
            seed_generators(seed)

    @property
    def left(self) -> float:
        """Seconds of a call that begins now; 0: it is too late."""
        return max(0.0, min(self.seconds, self.until - time.perf_counter()))

    def next_seed(self) -> int:
        """Return the seed of the worker's next call: the first one has this context's own."""
        self._calls += 1
        return (self.seed + (self._calls - 1) * _ODD) & _LARGEST_SEED

    def with_seed(self, seed: int) -> CallContext:
        """Return a context for repeating an earlier call, with that call's seed."""
        return CallContext(self.seconds, seed, until=self.until, alone=self.alone)


CALL_CONTEXT: ContextVar[CallContext] = ContextVar("asked")

_ODD, _LARGEST_SEED = 0x85EBCA6B, (1 << 32) - 1


@dataclass(frozen=True)
class TimedTask:
    """One thing that an environment does."""

    coroutine: Coroutine[Any, Any, Any]
    """Raises no `TimeoutError` of its own."""
    seconds: float
    """Time limit."""
    seed: int
    """Seed of the global random generators while it runs alone, in [0, 2^32)."""
    _: KW_ONLY
    until: float = math.inf
    """Absolute deadline, by `time.perf_counter`."""
    in_worker: bool = False
    """True if it runs in worker processes. They enforce its limit themselves, without counting the wait for a free
    worker."""

    @property
    def left(self) -> float:
        """Seconds that it has if it begins now; 0: it is too late."""
        return max(0.0, min(self.seconds, self.until - time.perf_counter()))


class Runner:
    """An event loop in a thread, and another one where something blocks it for good."""

    def __init__(self) -> None:
        self._loop = BackgroundLoop("lit_rl-environments")
        self.moved = time.perf_counter()
        """Time of the last start or end of a task."""

    def begin(self, task: TimedTask) -> RunningTask:
        """Begin it, beside others. Its future raises `TimedOut` where it awaits for longer than it may."""
        running = RunningTask(task)
        running.future = self._loop.submit(running.run(self))
        self.moved = time.perf_counter()
        return running

    def blocked(self, seconds: float) -> bool:
        """Tell whether no task has started or ended for `seconds`: the thread is blocked."""
        return time.perf_counter() > self.moved + seconds

    def one(self, task: TimedTask) -> Any:
        """Run a task of workers while this thread waits; `TimedOut` where it exceeded its limit.

        Raises:
            Exception: that the task raises.
        """
        try:
            return self.begin(task).future.result()
        except TimedOut as late:
            return late

    def in_order(self, tasks: Sequence[TimedTask]) -> list[Any]:
        """Return what each gives, one after another while this thread waits; `TimedOut` where it took longer than it
        may.

        What draws from the global generators draws the same whatever ran before it, and leaves them as they were. What
        blocks for longer than it may is left to itself, since nothing can end it, and the others go on without it.

        Raises:
            Exception: the first that a task raises.
        """
        results: list[Any] = []
        with preserve_process_state("an environment, or a tool"):
            while len(results) < len(tasks):
                turn = _SequentialTasks(tasks[len(results) :])
                future = self._loop.submit(turn.run())
                while not _wait_until(future, turn.deadline):
                    if turn.abandon():
                        self.abandon()
                        break
                results += turn.results
        return results

    def abandon(self) -> None:
        """Abandon the blocked thread: later tasks go to another one."""
        self._loop = BackgroundLoop("lit_rl-environments")


class _SequentialTasks:
    """Tasks that run one after another in the other thread."""

    def __init__(self, tasks: Sequence[TimedTask]) -> None:
        self._tasks = tasks
        self._lock = threading.Lock()
        self._abandoned = False
        self.results: list[Any] = []
        self.deadline = time.perf_counter() + tasks[0].left + GRACE
        """Deadline of the running task."""

    async def run(self) -> None:
        for task in self._tasks:
            left = task.left
            self.deadline = time.perf_counter() + left + GRACE
            CALL_CONTEXT.set(CallContext(task.seconds, task.seed, until=task.until, alone=True))
            result = await task.coroutine if left else _expired(task)
            with self._lock:
                if self._abandoned:  # abandoned: other tasks run by now
                    return
                self.results.append(result)

    def abandon(self) -> bool:
        """Abandon the running task, if its time is over."""
        with self._lock:
            self._abandoned = len(self.results) < len(self._tasks) and time.perf_counter() > self.deadline
            if self._abandoned:
                self.results.append(TimedOut())
        return self._abandoned


def _expired(task: TimedTask) -> TimedOut:
    """Close a task's coroutine and return its timeout."""
    task.coroutine.close()
    return TimedOut()


def _wait_until(future: Future[None], deadline: float) -> bool:
    """Wait until the deadline, and tell whether the future is done."""
    wait([future], timeout=max(0.0, deadline - time.perf_counter()))
    if not future.done():
        return False
    future.result()
    return True


class RunningTask:
    """A task that goes on beside others."""

    def __init__(self, task: TimedTask) -> None:
        self.task = task
        self.future: Future[Any] = Future()
        self._lock = threading.Lock()
        self._runs = self._abandoned = False

    async def run(self, runner: Runner) -> Any:
        """Run the task and return its result. Its time begins here, and not while others block the thread."""
        with self._lock:
            if self._abandoned:
                return None
            self._runs = True
        runner.moved = time.perf_counter()
        try:
            if not (left := self.task.left):
                raise _expired(self.task)
            CALL_CONTEXT.set(CallContext(self.task.seconds, self.task.seed, until=self.task.until, alone=False))
            async with asyncio.timeout(None if self.task.in_worker else left):
                return await self.task.coroutine
        except TimeoutError as error:
            raise TimedOut from error
        finally:
            runner.moved = time.perf_counter()

    def abandon(self) -> bool:
        """Give it up, and return True if it had begun; else it can be begun in another thread."""
        with self._lock:
            self._abandoned = True
        return self._runs
