"""Runs what environments do, each with a limit of time, in a thread of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from lit_rl.rewards.execution.event_loops import BackgroundLoop

T = TypeVar("T")

_GRACE = 1.0
"""Seconds beyond its limit in which what awaits is cancelled. What has not given way by then blocks the thread."""


class Late(Exception):
    """It took longer than it may."""


class Runner:
    """An event loop in a thread, and another one where something blocks it for good."""

    def __init__(self) -> None:
        self._loop = BackgroundLoop("lit_rl-environments")

    def wait(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """What it gives; this thread waits for it.

        Raises:
            Late: it took longer. What awaits is cancelled; what blocks is left to itself, since nothing can end it.
        """
        future = self.submit(coroutine, seconds)
        try:
            return future.result(timeout=seconds + _GRACE)
        except TimeoutError as error:
            if not future.done():
                self.leave()
            raise Late from error

    def submit(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> Future[T]:
        """Begin it. The future raises `Late` where it awaits for longer."""
        return self._loop.submit(_limited(coroutine, seconds))

    def leave(self) -> None:
        """Something blocks the thread: what comes goes to another one."""
        self._loop = BackgroundLoop("lit_rl-environments")


async def _limited(coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
    async def marked() -> T:
        try:
            return await coroutine
        except TimeoutError as error:  # its own, and not that of the limit
            raise RuntimeError(f"TimeoutError: {error}") from error

    try:
        return await asyncio.wait_for(marked(), seconds)
    except TimeoutError as error:
        raise Late from error


class GlobalRandomness:
    """The state of Python's and numpy's global generators that one episode draws from, and no other.

    Args:
        seed: In [0, 2^32).
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed).get_state()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """What draws from the global generators draws from this state."""
        python, numpy = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(python)
            np.random.set_state(numpy)
