"""Completions that are asked for before they are needed: a queue of requests, drawn while something else goes on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lit_rl.generation.base import Gap
from lit_rl.rollout import Completions

Name = tuple[int, tuple[int, ...]]
"""Which completions: the index of the rollout, and the data-set rows of its prompts."""


@dataclass(frozen=True)
class Drawn:
    """Completions that were asked for ahead."""

    completions: Completions
    gap: Gap | None = None
    """What the probe saw of the weights that they were drawn with; None where nothing was probed."""


class Ahead:
    """Requests in the order in which they are needed, each drawn once the one before it is: one at a time.

    For a generator that draws elsewhere, with weights of its own. Nothing that a request in flight needs may change,
    so who wants the generator for anything else waits first. A copy or a pickle holds no request.
    """

    def __init__(self) -> None:
        self._requests: deque[_Request] = deque()

    def __getstate__(self) -> dict[str, Any]:
        return vars(Ahead())

    @property
    def pending(self) -> bool:
        """Whether there is a request, in flight or done."""
        return bool(self._requests)

    @property
    def names(self) -> list[Name]:
        """Of all requests, waiting, in flight or done."""
        return [request.name for request in self._requests]

    def start(self, name: Name, draw: Callable[[], Drawn]) -> None:
        """Draw in a thread, behind all that was asked for before. Where one of those fails, this one fails with it."""
        request = _Request(name)
        request.begin(draw, self._requests[-1] if self._requests else None)
        self._requests.append(request)

    def wait(self) -> None:
        """Until nothing is in flight. What came of it is kept, an error too."""
        for request in self._requests:
            request.wait()

    def take(self) -> tuple[Name, Drawn] | None:
        """The next completions, waited for; None where nothing was asked for.

        Raises:
            Exception: the generator's own, if it failed. All requests are gone then.
        """
        if not self._requests:
            return None
        self._requests[0].wait()
        if (error := self._requests[0].error) is not None:
            self.forget()
            raise error
        request = self._requests.popleft()
        assert request.drawn is not None
        return request.name, request.drawn

    def peek(self, patience: float | None = None) -> list[tuple[Name, Drawn]]:
        """All completions, waited for and left in their place, up to where the generator failed.

        Args:
            patience: Seconds after which the wait ends; what is not drawn then is left out. None waits for all.
        """
        until = None if patience is None else time.monotonic() + patience
        for request in self._requests:
            request.wait(None if until is None else max(0.0, until - time.monotonic()))
        return [(request.name, request.drawn) for request in self._requests if request.drawn is not None]

    def put(self, name: Name, drawn: Drawn) -> None:
        """Completions that were drawn in another life of the run, behind all others."""
        self._requests.append(_Request(name, drawn))

    def put_first(self, name: Name, drawn: Drawn) -> None:
        """Completions that were taken and not used, before all others."""
        self._requests.appendleft(_Request(name, drawn))

    def forget(self) -> None:
        """Wait until nothing is in flight, and throw all of it away."""
        self.wait()
        self._requests.clear()


class _Request:
    """One request, and what became of it."""

    def __init__(self, name: Name, drawn: Drawn | None = None) -> None:
        self.name, self.drawn = name, drawn
        self.error: BaseException | None = None
        self._done = threading.Event()
        if drawn is not None:
            self._done.set()

    def begin(self, draw: Callable[[], Drawn], before: _Request | None) -> None:
        name = f"rollout {self.name[0]}"
        threading.Thread(target=self._work, args=(draw, before), name=name, daemon=True).start()

    def _work(self, draw: Callable[[], Drawn], before: _Request | None) -> None:
        try:
            if before is not None:
                before.wait()
                self.error = before.error
            if self.error is None:
                self.drawn = draw()
        except BaseException as error:  # raised by `take`, where the run can end in order
            self.error = error
        finally:
            self._done.set()

    def wait(self, seconds: float | None = None) -> None:
        self._done.wait(seconds)  # a thread whose `join` was interrupted counts as ended
