"""Completions that are asked for before they are needed, drawn while something else goes on: one request at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lit_rl.generation.ranks import beside
from lit_rl.rollout import Completions

Name = tuple[int, tuple[int, ...]]
"""Which completions: the index of the rollout, and the data-set rows of its prompts."""


class Ahead:
    """At most one request in flight, or its completions, not taken yet.

    For a generator that draws elsewhere, with weights of its own: nothing that the request needs may change until it
    is done, so whoever changes the engine's weights waits first. A copy or a pickle holds no request.
    """

    def __init__(self) -> None:
        self._name: Name | None = None
        self._thread: threading.Thread | None = None
        self._completions: Completions | None = None
        self._error: BaseException | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(Ahead())

    @property
    def pending(self) -> bool:
        """Whether there is a request, in flight or done."""
        return self._name is not None

    def start(self, name: Name, draw: Callable[[], Completions]) -> None:
        """Begin to draw in a thread. The one before has been taken."""
        assert self._name is None
        self._name = name

        def work() -> None:
            try:
                with beside():
                    self._completions = draw()
            except BaseException as error:  # raised by `take`, where the run can end in order
                self._error = error

        self._thread = threading.Thread(target=work, name=f"rollout {name[0]}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is in flight. What came of it is kept, an error too."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take(self) -> tuple[Name, Completions] | None:
        """The completions that were asked for, waited for; None where nothing was.

        Raises:
            Exception: the generator's own, if it failed.
        """
        self.wait()
        name, completions, error = self._name, self._completions, self._error
        self._name = self._completions = self._error = None
        if error is not None:
            raise error
        return None if name is None or completions is None else (name, completions)

    def peek(self) -> tuple[Name, Completions] | None:
        """What `take` would return, left in its place; None where the generator failed."""
        self.wait()
        return None if self._name is None or self._completions is None else (self._name, self._completions)

    def put(self, name: Name, completions: Completions) -> None:
        """Completions that were drawn in another life of the run."""
        self.wait()
        self._name, self._completions, self._error = name, completions, None
