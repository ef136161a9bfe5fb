"""Where the seconds of a step went: generation, rewards, clipping and optimizer; training is the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Phases:
    """Seconds by phase, of the step that runs.

    Phases of a GPU overlap unless it is waited for at their borders, which makes a step slower: `exact` waits.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self._synchronize = synchronize
        self.exact = False
        self.seconds: dict[str, float] = {}
        self._open: tuple[str, float] | None = None

    def clear(self) -> None:
        self.seconds, self._open = {}, None

    def now(self) -> float:
        if self.exact:
            self._synchronize()
        return time.perf_counter()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its seconds added to a phase."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(name, self.now() - before)

        return call

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def until_the_end(self, name: str) -> None:
        """From now to the end of the step it is this phase."""
        self._open = name, self.now()

    def close(self) -> None:
        """The step is over."""
        if self._open is not None:
            name, began = self._open
            self.add(name, self.now() - began)
            self._open = None
