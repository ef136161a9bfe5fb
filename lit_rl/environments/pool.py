"""Environments and tools in worker processes that can be killed: the training's side.

An object lives in one worker from its first call to its last, beside others. A worker does one call at a time, and
different workers work at the same time. A worker whose call takes too long is killed with every process of its group.
The other objects that lived in it are `Gone`: who asks for them makes them anew (`remembered`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Any, NoReturn

from lit_rl.by_path import Named, named_by
from lit_rl.environments.runner import ASKED, Asked, Late, NoReply
from lit_rl.environments.worker import Call, Setup, Target
from lit_rl.errors import ConfigError, GenerationError
from lit_rl.rewards.execution.event_loops import BackgroundLoop
from lit_rl.rewards.execution.failures import WorkerTraceback
from lit_rl.rewards.execution.worker_output import quote_output
from lit_rl.rewards.execution.worker_process import WorkerProcess
from lit_rl.rewards.workers.job import CallFailed, Failure

_LOOP = BackgroundLoop("lit_rl-environment-workers")


class WorkerLost(NoReply):
    """The error for a worker that ended during the call."""


class Gone(NoReply):
    """The error for a call of an object whose worker had ended before, by another object's call or by itself."""


class _Raised(Exception):
    """An exception of the user's code in a worker: subclasses have the name of its class."""


class Pool:
    """Workers of one process of the run. They start when they are first needed, and end with this object or at exit.

    A pickled or copied pool starts its own.

    Args:
        size: Processes, 1 or more.
        memory_mb: Most address space of each, in MiB (RLIMIT_AS); None is no limit.
    """

    def __init__(self, size: int, memory_mb: int | None = None) -> None:
        self.size, self.memory_mb = size, memory_mb
        self.targets: list[Target] = []
        self.modules: list[str] = []
        """Modules of lit_rl that the workers load beside their own, each before those that import it."""
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._places = [_Place() for _ in range(self.size)]
        self._numbers = itertools.count()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def objects(self, target: Target, methods: Collection[str]) -> Callable[[], WorkerObject]:
        """Return a function that makes objects of the class at this path, with these methods."""
        return partial(WorkerObject, self, self._add(target), frozenset(methods))

    def function(self, target: Target) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return an async function that calls the function at this path in any free worker."""
        number = self._add(target)

        async def called(*arguments: Any, **keywords: Any) -> Any:
            asked = ASKED.get()
            call = Call(number, None, target.name, arguments, keywords, asked.next_seed())
            given, _ = await _in_loop(self.call(call, asked, None))
            return _given(given)

        return called

    def _add(self, target: Target) -> int:
        self.targets.append(target)
        return len(self.targets) - 1

    # ------------------------------------------------------------------ in the loop of the workers

    async def call(self, call: Call, asked: Asked, life: _Life | None) -> tuple[Any, _Life]:
        """Return the result of a call, or the `Failure` of the user's code, with the life of the worker that computed
        it.

        Args:
            call: Call of a function, or of an object.
            asked: Context of the call: its time limit counts from when the worker begins.
            life: In which the object was made; None: it is to be made, or there is none.

        Raises:
            Late: it took longer. Its worker is ended.
            WorkerLost: its worker ended.
            Gone: the life of the object is over.
            GenerationError: no worker can be started.
        """
        place = self._freest(call) if life is None else life.place
        place.waiting += 1
        try:
            async with place.lock:
                if life is not None and not (place.life is life and life.process.alive):
                    raise Gone("its worker has ended")
                alive = await self._alive(place)
                if life is None and call.object is not None:
                    alive.objects += 1
                if not (limit := asked.left):  # the wait for the worker used it up
                    raise Late
                return await alive.call(call, limit), alive
        finally:
            place.waiting -= 1

    def _freest(self, call: Call) -> _Place:
        if self._pid != os.getpid():  # forked: the workers belong to the parent process
            self._reset()
        if call.object is None:
            return min(self._places, key=lambda place: place.waiting)
        return min(self._places, key=lambda place: place.objects)

    async def _alive(self, place: _Place) -> _Life:
        if place.life is not None and not place.life.process.alive:
            place.life.end()
        if place.life is None:
            place.life = await self._started(place)
        return place.life

    async def _started(self, place: _Place) -> _Life:
        try:
            process = WorkerProcess("env", [*self.modules, "lit_rl.environments.worker"])
        except OSError as error:
            raise GenerationError(f"env.workers={self.size}: no worker process can be started: {error}.") from error
        failure = await process.start(Setup(tuple(self.targets), self.memory_mb, os.getpid()))
        if failure is not None:
            process.kill()
            what = ", ".join(f"{target.source}:{target.name}" for target in self.targets)
            hint = f" It may take {self.memory_mb} MiB (env.memory_mb)." if self.memory_mb else ""
            raise GenerationError(
                f"env.workers={self.size}: a worker process failed while it imported {what}, with {failure.kind}: "
                f"{failure.text}{quote_output(failure.output)}.{hint}"
            )
        return _Life(place, process, self.memory_mb)

    async def let_go(self, call: Call, asked: Asked, life: _Life) -> None:
        """Close an object, if it lives."""
        if life.place.life is life:
            life.objects -= 1
            with contextlib.suppress(Gone):
                await self.call(call, asked, life)


class _Place:
    """A slot for one worker at a time."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.life: _Life | None = None
        self.waiting = 0
        """Calls, the one that goes on included."""

    @property
    def objects(self) -> int:
        """Objects that live here, or are about to."""
        return self.waiting + (self.life.objects if self.life is not None else 0)


class _Life:
    """One worker from its start to its end."""

    def __init__(self, place: _Place, process: WorkerProcess, memory_mb: int | None) -> None:
        self.place, self.process, self._memory_mb = place, process, memory_mb
        self.objects = 0

    async def call(self, call: Call, limit: float) -> Any:
        """Return the result of a call, or the failure of the user's code."""
        try:
            reply, _ = await self.process.ask(call, limit, call.method)
        except CallFailed as failed:
            if failed.failure.timed_out or failed.failure.died:
                self._fail(failed.failure, call)
            return failed.failure  # the call could not be sent
        except BaseException:
            self.end()
            raise
        _show(self.process.output.take())
        if isinstance(reply, Failure) and reply.kind == "MemoryError":
            self._fail(reply, call)
        return reply

    def _fail(self, failure: Failure, call: Call) -> NoReturn:
        self.end()
        if failure.timed_out:
            raise Late
        limit = f" It may take {self._memory_mb} MiB (env.memory_mb)." if self._memory_mb else ""
        how = failure.text if failure.died else f"ended, after {failure.kind}: {failure.text}"
        raise WorkerLost(f"the worker process {how} during {call.method}{quote_output(failure.output)}.{limit}")

    def end(self) -> None:
        """End what is left of the worker and its group."""
        self.process.kill()
        self.place.life = None


class WorkerObject:
    """An object of the user's that lives in a worker: made there by its first call. Its methods are awaited.

    Args:
        pool: Pool of the workers.
        target: Place of its class in the pool.
        methods: Names of its methods.
    """

    def __init__(self, pool: Pool, target: int, methods: frozenset[str]) -> None:
        self._pool, self._target, self._methods = pool, target, methods
        self._number = next(pool._numbers)
        self._life: _Life | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(f"there is no method {name!r}")
        return partial(self._call, name)

    async def close(self) -> None:
        """Close the object and let it go, if it lives."""
        life, self._life = self._life, None
        if life is not None:
            call = Call(self._target, self._number, "close", (), {}, ASKED.get().next_seed())
            await _in_loop(self._pool.let_go(call, ASKED.get(), life))

    async def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        asked = ASKED.get()
        call = Call(self._target, self._number, method, arguments, keywords, asked.next_seed())
        given, self._life = await _in_loop(self._pool.call(call, asked, self._life))
        return _given(given)


def target_of(path: Any, key: str) -> tuple[Named, Target]:
    """Resolve a path, for this process and for a worker.

    Args:
        path: ``package.module:name`` or ``./file.py:name``.
        key: Name of the setting, for messages.

    Raises:
        ConfigError: it is no path, or names nothing.
    """
    if not isinstance(path, str):
        name = getattr(path, "__name__", type(path).__name__)
        raise ConfigError(
            f"env.workers runs what {key} names in processes of its own, which find it by its path, and {name} was "
            f"given as an object: give 'package.module:{name}' or './file.py:{name}', or take env.workers=0."
        )
    named = named_by(path, key)
    return named, Target(named.source, named.text, named.name)


def _given(given: Any) -> Any:
    """Return the result of the user's code.

    Raises:
        Exception: what it raised, by the name of its class.
    """
    if isinstance(given, Failure):
        raise type(given.kind, (_Raised,), {})(given.text) from WorkerTraceback(given.trace)
    return given


async def _in_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in the loop of the workers."""
    return await asyncio.wrap_future(_LOOP.submit(coroutine))


def _show(output: str) -> None:
    """Print what a worker printed."""
    if output and sys.stdout is not None:
        with contextlib.suppress(OSError, ValueError):  # a closed output must not end a run
            sys.stdout.write(output)
