"""Processes that wait between their turns, as many as their memory allows.

To start one costs its imports, its model and the steps that do not count: so those that were measured last are kept,
and in the next round, which goes the other way round, they come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.protocol import Process


class Waiting:
    """Processes by name, the one that was used last at the end.

    Args:
        most: Bytes that they, and the one that is measured, may have together, by the highest that each had.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._running: dict[str, Process] = {}
        self._peaks: dict[str, int] = {}
        self._unknown = 0

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *failure: object) -> None:
        for name in list(self._running):
            self._end(name)

    @property
    def names(self) -> list[str]:
        """Those that run."""
        return list(self._running)

    @contextmanager
    def turn(self, name: str, start: Callable[[], Process], begin: Callable[[Process], None]) -> Iterator[Process]:
        """The process of this name: the one that waits, or a fresh one, for which the oldest make room.

        Args:
            name: Its name.
            start: Makes it.
            begin: Takes its first steps.
        """
        process = self._running.pop(name, None)
        self._make_room(self._peaks.get(name, self._unknown))
        if process is None:
            process = self._running[name] = start().__enter__()
            begin(process)
        self._running[name] = process
        yield process
        peak = self._peaks[name] = process.usage().peak
        self._unknown = max(self._unknown, peak)
        self._make_room(0)

    def _make_room(self, needed: int) -> None:
        """End the oldest until there is room for so many bytes."""
        while self._running and needed + sum(self._peaks.get(name, 0) for name in self._running) > self._most:
            self._end(next(iter(self._running)))

    def _end(self, name: str) -> None:
        self._running.pop(name).__exit__(None, None, None)
