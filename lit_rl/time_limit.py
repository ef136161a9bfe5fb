"""A limit of time on what runs in the main thread, where nothing else could end it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lit_rl.errors import ConfigError


class TookTooLong(BaseException):
    """Its time is over. No `Exception`: a function that goes on after any of these does not go on after this one."""


@contextmanager
def time_limit(seconds: float | None, key: str) -> Iterator[None]:
    """Interrupt the block when its time is over, by the alarm signal of the process.

    Waiting (for a socket, a lock, a sleep) is interrupted at once; a call of compiled code returns first.

    Args:
        seconds: None is no limit.
        key: The setting of the limit, for messages.

    Raises:
        TookTooLong: in the block, and out of it.
        ConfigError: this is not the main thread, or the system has no such signal.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        raise ConfigError(
            f"{key}={seconds:g} is kept by an alarm signal, which reaches the main thread of a process on Linux and "
            "macOS alone: train there, or leave it out and limit the function inside."
        )
    inside = True

    def over(number: int, frame: Any) -> None:
        if inside:
            raise TookTooLong

    before = signal.signal(signal.SIGALRM, over)
    others, begun = signal.setitimer(signal.ITIMER_REAL, seconds), time.monotonic()
    try:
        yield
    finally:
        inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if others[0]:  # an earlier alarm: restore its remaining time
            signal.setitimer(signal.ITIMER_REAL, max(others[0] - (time.monotonic() - begun), 1e-3), others[1])
