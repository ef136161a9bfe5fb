"""Event loops beside one that may run already, such as a notebook's: in this thread, or in background threads."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from lit_rl.core.errors import RewardError

Result = TypeVar("Result")


def run_coroutine(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Wait for a coroutine on a new loop in this thread, also where a notebook's loop runs in it.

    For code that has to run in the main thread, such as code with signals as time limits. Tasks that the coroutine
    leaves running are cancelled, and threads that it started are not waited for.
    """
    with hide_running_loop():
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(coroutine)
        finally:
            try:
                tasks = asyncio.all_tasks(loop)
                for task in tasks:
                    task.cancel()
                if tasks:
                    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
                loop.run_until_complete(loop.shutdown_asyncgens())
            finally:
                loop.close()


@contextmanager
def hide_running_loop() -> Iterator[None]:
    """Hide a running event loop from this thread, for code that starts one of its own."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)


T = TypeVar("T")


class BackgroundLoop:
    """An event loop in a daemon thread, started on first use, and again in a forked process.

    Once it is garbage-collected, the thread ends as soon as nothing runs on it, and frees its descriptors.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop.

        Raises:
            RewardError: called from the loop's own thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RewardError("an async reward function scores other rewards and waits for them. Await them instead.")
        return asyncio.run_coroutine_threadsafe(coroutine, self._running())

    def wait(self, awaitable: Awaitable[T]) -> T:
        """Await it on the loop, and block this thread until then."""

        async def awaited() -> T:
            return await awaitable

        future = self.submit(awaited())
        try:
            return future.result()
        finally:
            future.cancel()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self.name, daemon=True)
                self._thread.start()
                weakref.finalize(self, _end_loop, self._loop, self._pid).atexit = False
            return self._loop

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        torch.set_grad_enabled(False)  # per thread; rewards in the training's own thread have none either
        asyncio.set_event_loop(loop)
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _end_loop(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """Stop a loop once its tasks are over. In a forked process it is the parent's, and only its memory is here."""
    if pid != os.getpid():
        return

    async def stop_when_idle() -> None:
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        loop.stop()

    asyncio.run_coroutine_threadsafe(stop_when_idle(), loop)


FUNCTION_LOOP = BackgroundLoop("lit_rl-async-rewards")
"""The loop of users' coroutines."""

WORKER_LOOP = BackgroundLoop("lit_rl-reward-workers")
"""The loop of worker processes. A separate one: a user's coroutine that blocks must not keep a limit from firing."""

BESIDE_LOOP = BackgroundLoop("lit_rl-rewards-beside")
"""Runs functions of this process that allow a thread of their own, one after another."""


def run_without_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, on this thread and without a loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise RuntimeError("the coroutine suspended; it needs a loop")
