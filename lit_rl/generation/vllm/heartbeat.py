"""A progress line while completions are made."""

from __future__ import annotations

import sys
import time


class Beat:
    """A printer of the number of finished completions, at most once in `every` seconds; None prints nothing."""

    def __init__(self, every: float | None) -> None:
        self._every, self._last = every, time.monotonic()

    def __call__(self, done: int, asked: int) -> None:
        now = time.monotonic()
        if self._every is not None and now - self._last >= self._every:
            self._last = now
            sys.stdout.write(f"generating: {done} of {asked} completions\n")
            sys.stdout.flush()
