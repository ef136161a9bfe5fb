"""Completions that are requested before they are needed: a queue of requests, drawn in the background."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lit_rl.core.rollout import Completions
from lit_rl.generation.generator import Gap

RolloutName = tuple[int, tuple[int, ...]]
"""The index of a rollout, and the data-set rows of its prompts."""


@dataclass(frozen=True)
class DrawnAhead:
    """Completions that were requested ahead."""

    completions: Completions
    gap: Gap | None = None
    """The probe's gap for the weights that they were drawn with; None without a probe."""


class Ahead:
    """A queue of requests in the order in which they are needed, drawn one at a time.

    For a generator that draws elsewhere, with weights of its own. Nothing that a request in flight needs may change:
    any other use of the generator waits first. A copy or a pickle holds no request.
    """

    def __init__(self) -> None:
        self._requests: deque[_Request] = deque()

    def __getstate__(self) -> dict[str, Any]:
        return vars(Ahead())

    @property
    def pending(self) -> bool:
        """Tell whether there is a request, in flight or done."""
        return bool(self._requests)

    @property
    def names(self) -> list[RolloutName]:
        """The names of all requests, waiting, in flight or done."""
        return [request.name for request in self._requests]

    def start(self, name: RolloutName, draw: Callable[[], DrawnAhead]) -> None:
        """Draw in a thread, after all earlier requests. Where one of those fails, this one fails with it."""
        request = _Request(name)
        request.begin(draw, self._requests[-1] if self._requests else None)
        self._requests.append(request)

    def wait(self) -> None:
        """Wait until nothing is in flight. Results are kept, and errors too."""
        for request in self._requests:
            request.wait()

    def take(self) -> tuple[RolloutName, DrawnAhead] | None:
        """Return the next completions, after a wait for them; None where nothing was requested.

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

    def peek(self, patience: float | None = None) -> list[tuple[RolloutName, DrawnAhead]]:
        """Return all completions, after a wait for them, up to the first failure; they stay in the queue.

        Args:
            patience: Seconds after which the wait ends, without the completions that are not drawn by then. None waits
                for all.
        """
        until = None if patience is None else time.monotonic() + patience
        for request in self._requests:
            request.wait(None if until is None else max(0.0, until - time.monotonic()))
        return [(request.name, request.drawn) for request in self._requests if request.drawn is not None]

    def put(self, name: RolloutName, drawn: DrawnAhead) -> None:
        """Append completions that an earlier process of the run has drawn."""
        self._requests.append(_Request(name, drawn))

    def put_first(self, name: RolloutName, drawn: DrawnAhead) -> None:
        """Put back completions that were taken and not used, before all others."""
        self._requests.appendleft(_Request(name, drawn))

    def forget(self) -> None:
        """Wait until nothing is in flight, and discard all requests."""
        self.wait()
        self._requests.clear()


class _Request:
    """One request, and its result."""

    def __init__(self, name: RolloutName, drawn: DrawnAhead | None = None) -> None:
        self.name, self.drawn = name, drawn
        self.error: BaseException | None = None
        self._done = threading.Event()
        if drawn is not None:
            self._done.set()

    def begin(self, draw: Callable[[], DrawnAhead], before: _Request | None) -> None:
        name = f"rollout {self.name[0]}"
        threading.Thread(target=self._work, args=(draw, before), name=name, daemon=True).start()

    def _work(self, draw: Callable[[], DrawnAhead], before: _Request | None) -> None:
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
