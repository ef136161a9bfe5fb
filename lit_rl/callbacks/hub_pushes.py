"""Uploads to the Hugging Face hub during a training: one push at a time, in a thread that no exit waits for."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from lit_rl.callbacks.unwritten import Unwritten
from lit_rl.long_waits import counted


class HubPushes:
    """The pushes of one callback, one at a time.

    `HfApi.run_as_future` is not used: at its exit Python waits for that pool without a timeout, and the hub's client
    waits for an answer without one.

    Args:
        what: The activity, for a warning and a progress bar: "sending samples to user/name".
        unwritten: Recorder of failures, called in the thread of the training.
    """

    def __init__(self, what: str, unwritten: Unwritten) -> None:
        self.what, self.unwritten = what, unwritten
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._then: Callable[[bool], None] = lambda done: None

    def start(self, push: Callable[[], object], then: Callable[[bool], None]) -> None:
        """Begin a push; none may be in progress.

        Args:
            push: Function for a thread of its own; it reads only what nobody else writes.
            then: Callback that `busy` or `wait` calls when the push is over, with whether it succeeded.
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
        """Tell whether a push is in progress, and record one that has ended."""
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
        """Wait for the push in progress, under a progress bar; return whether it is over.

        Args:
            until: The end of the wait, by the clock `time.monotonic`.
        """
        seconds = max(0.0, until - time.monotonic())
        if self._thread is not None:
            for _ in counted(range(math.ceil(seconds)), f"{self.what}, at most", "s"):
                self._thread.join(min(1.0, max(0.0, until - time.monotonic())))
                if not self._thread.is_alive():
                    break
        return not self.busy()
