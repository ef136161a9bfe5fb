"""An event loop of our own in the thread that asks, beside one that may run there already."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


def awaited(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Wait for a coroutine on a new loop in this thread, also where a notebook's loop runs in it.

    For code that has to run in the main thread, such as code with signals as time limits. Tasks that the coroutine
    leaves running are cancelled, and threads that it started are not waited for.
    """
    with no_loop():
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(coroutine)
        finally:
            try:
                loop.run_until_complete(_cancelled(asyncio.all_tasks(loop)))
                loop.run_until_complete(loop.shutdown_asyncgens())
            finally:
                loop.close()


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def no_loop() -> Iterator[None]:
    """Hide a running event loop from this thread, for code that starts one of its own."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
