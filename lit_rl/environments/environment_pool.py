"""Environments and tools in worker processes that can be killed: the side of the training process.

An object lives in one worker from its first call to its last, beside others. A worker does one call at a time, and
different workers work at the same time. A worker whose call takes too long is killed with every process of its group.
Calls of the other objects that lived in it raise `ObjectLost`, and their callers make them again (`episode_replay`).
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

from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.event_loops import BackgroundLoop
from lit_rl.core.user_functions import LoadedObject, load_by_path
from lit_rl.environments.environment_worker import Target, WorkerCall, WorkerSetup
from lit_rl.environments.runner import CALL_CONTEXT, CallContext, NoReply, TimedOut
from lit_rl.rewards.caller import WorkerTraceback
from lit_rl.rewards.jobs import CallFailed, Failure
from lit_rl.rewards.workers import WorkerProcess, quote_output

_LOOP = BackgroundLoop("lit_rl-environment-workers")


class WorkerLost(NoReply):
    """The error for a worker that ended during the call."""


class ObjectLost(NoReply):
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
        self._slots = [_WorkerSlot() for _ in range(self.size)]
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
            asked = CALL_CONTEXT.get()
            call = WorkerCall(number, None, target.name, arguments, keywords, asked.next_seed())
            result, _ = await _run_in_loop(self.call(call, asked, None))
            return _result_or_raise(result)

        return called

    def _add(self, target: Target) -> int:
        self.targets.append(target)
        return len(self.targets) - 1

    # ------------------------------------------------------------------ in the loop of the workers

    async def call(self, call: WorkerCall, asked: CallContext, life: _WorkerLife | None) -> tuple[Any, _WorkerLife]:
        """Return the result of a call, or the `Failure` of the user's code, with the life of the worker that computed
        it.

        Args:
            call: Call of a function, or of an object.
            asked: Context of the call: its time limit counts from when the worker begins.
            life: In which the object was made; None: it is to be made, or there is none.

        Raises:
            TimedOut: it exceeded its limit. Its worker is ended.
            WorkerLost: its worker ended.
            ObjectLost: the object's worker had ended.
            GenerationError: no worker can be started.
        """
        if life is not None:
            slot = life.slot
        else:  # the least busy one
            if self._pid != os.getpid():  # forked: the workers belong to the parent process
                self._reset()
            slot = min(self._slots, key=lambda each: each.waiting if call.object is None else each.objects)
        slot.waiting += 1
        try:
            async with slot.lock:
                if life is not None and not (slot.life is life and life.process.alive):
                    raise ObjectLost("its worker has ended")
                if slot.life is not None and not slot.life.process.alive:
                    slot.life.end()
                if slot.life is None:
                    slot.life = await self._start_worker(slot)
                live = slot.life
                if life is None and call.object is not None:
                    live.objects += 1
                if not (limit := asked.left):  # the wait for the worker used it up
                    raise TimedOut
                return await live.call(call, limit), live
        finally:
            slot.waiting -= 1

    async def _start_worker(self, slot: _WorkerSlot) -> _WorkerLife:
        try:
            process = WorkerProcess("env", [*self.modules, "lit_rl.environments.environment_worker"])
        except OSError as error:
            raise GenerationError(f"env.workers={self.size}: no worker process can be started: {error}.") from error
        failure = await process.start(WorkerSetup(tuple(self.targets), self.memory_mb, os.getpid()))
        if failure is not None:
            process.kill()
            what = ", ".join(f"{target.source}:{target.name}" for target in self.targets)
            hint = f" It may take {self.memory_mb} MiB (env.memory_mb)." if self.memory_mb else ""
            raise GenerationError(
                f"env.workers={self.size}: a worker process failed while it imported {what}, with {failure.kind}: "
                f"{failure.text}{quote_output(failure.output)}.{hint}"
            )
        return _WorkerLife(slot, process, self.memory_mb)

    async def release(self, call: WorkerCall, asked: CallContext, life: _WorkerLife) -> None:
        """Close an object, if it lives."""
        if life.slot.life is life:
            life.objects -= 1
            with contextlib.suppress(ObjectLost):
                await self.call(call, asked, life)


class _WorkerSlot:
    """A slot for one worker at a time."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.life: _WorkerLife | None = None
        self.waiting = 0
        """Calls, the one that goes on included."""

    @property
    def objects(self) -> int:
        """Objects that live here, or are about to."""
        return self.waiting + (self.life.objects if self.life is not None else 0)


class _WorkerLife:
    """One worker from its start to its end."""

    def __init__(self, slot: _WorkerSlot, process: WorkerProcess, memory_mb: int | None) -> None:
        self.slot, self.process, self._memory_mb = slot, process, memory_mb
        self.objects = 0

    async def call(self, call: WorkerCall, limit: float) -> Any:
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
        output = self.process.output.take()
        if output and sys.stdout is not None:
            with contextlib.suppress(OSError, ValueError):  # a closed output must not end a run
                sys.stdout.write(output)
        if isinstance(reply, Failure) and reply.kind == "MemoryError":
            self._fail(reply, call)
        return reply

    def _fail(self, failure: Failure, call: WorkerCall) -> NoReturn:
        self.end()
        if failure.timed_out:
            raise TimedOut
        limit = f" It may take {self._memory_mb} MiB (env.memory_mb)." if self._memory_mb else ""
        how = failure.text if failure.died else f"ended, after {failure.kind}: {failure.text}"
        raise WorkerLost(f"the worker process {how} during {call.method}{quote_output(failure.output)}.{limit}")

    def end(self) -> None:
        """End what is left of the worker and its group."""
        self.process.kill()
        self.slot.life = None


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
        self._life: _WorkerLife | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(f"there is no method {name!r}")
        return partial(self._call, name)

    async def close(self) -> None:
        """Close the object and let it go, if it lives."""
        life, self._life = self._life, None
        if life is not None:
            call = WorkerCall(self._target, self._number, "close", (), {}, CALL_CONTEXT.get().next_seed())
            await _run_in_loop(self._pool.release(call, CALL_CONTEXT.get(), life))

    async def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        asked = CALL_CONTEXT.get()
        call = WorkerCall(self._target, self._number, method, arguments, keywords, asked.next_seed())
        result, self._life = await _run_in_loop(self._pool.call(call, asked, self._life))
        return _result_or_raise(result)


def target_of(path: Any, key: str) -> tuple[LoadedObject, Target]:
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
            f"env.workers runs {key} in other processes, which import it by its path, but {name} was given as an "
            f"object. Give 'package.module:{name}' or './file.py:{name}', or set env.workers=0."
        )
    named = load_by_path(path, key)
    return named, Target(named.source, named.text, named.name)


def _result_or_raise(result: Any) -> Any:
    """Return the result of the user's code.

    Raises:
        Exception: what it raised, by the name of its class.
    """
    if isinstance(result, Failure):
        raise type(result.kind, (_Raised,), {})(result.text) from WorkerTraceback(result.trace)
    return result


async def _run_in_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in the loop of the workers."""
    return await asyncio.wrap_future(_LOOP.submit(coroutine))
