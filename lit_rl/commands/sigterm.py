"""SIGTERM ends a command that has no Trainer as Ctrl-C does: what is half written or started goes with it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lit_rl.errors import TERMINATED


@contextmanager
def sigterm_ends() -> Iterator[None]:
    """End at SIGTERM by way of every `finally`, with its exit code; a second one is ignored meanwhile.

    Raises:
        SystemExit: with 128 + the number of the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
