"""Sending to the Hugging Face hub beside a training: one push at a time, in a thread that no exit waits for."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from lit_rl.callbacks.unwritten import Unwritten
from lit_rl.long_waits import counted


class HubPushes:
    """The pushes of one callback, of which no two overlap.

    `HfApi.run_as_future` is not used: Python waits at its exit, without a bound, for the pool that this fills, and the
    hub's client waits for an answer without a bound.

    Args:
        what: That is done, as a warning and a bar call it: "sending samples to user/name".
        unwritten: What notes failures, in the thread of the training.
    """

    def __init__(self, what: str, unwritten: Unwritten) -> None:
        self.what, self.unwritten = what, unwritten
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._then: Callable[[bool], None] = lambda done: None

    def start(self, push: Callable[[], object], then: Callable[[bool], None]) -> None:
        """Begin a push; none may be going on.

        Args:
            push: Runs in a thread of its own, and reads only what nobody else writes.
            then: Called by `busy` or `wait` when it is over, with whether it was done.
        """
        assert self._thread is None

        def run() -> None:
            try:
                push()
            except Exception as error:
                self._error = error

        self._error, self._then = None, then
        self._thread = threading.Thread(target=run, name="hub push", daemon=True)
        self._thread.start()

    def busy(self) -> bool:
        """Whether a push is going on. One that has ended is taken note of."""
        if self._thread is None:
            return False
        if self._thread.is_alive():
            return True
        self._thread, error = None, self._error
        if error is not None:
            self.unwritten.note(self.what, error)
        self._then(error is None)
        return False

    def wait(self, until: float) -> bool:
        """Wait for the push that is going on, under a bar; returns whether it is over.

        Args:
            until: The end of the wait, of the clock `time.monotonic`.
        """
        seconds = max(0.0, until - time.monotonic())
        if self._thread is not None:
            for _ in counted(range(math.ceil(seconds)), f"{self.what}, at most", "s"):
                self._thread.join(min(1.0, max(0.0, until - time.monotonic())))
                if not self._thread.is_alive():
                    break
        return not self.busy()
