"""The threads of one server: one for each request that waits, and one that checks on the server meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lit_rl.generation.vllm.dealing import Task
from lit_rl.generation.vllm.requests import Answer

THREADS = "lit_rl-server"
"""The name of the threads."""
_LOOK_EVERY = 2.0
"""Seconds."""


@dataclass(frozen=True)
class Done:
    """A task that a server has answered."""

    server: int
    task: Task
    answers: list[Answer]


@dataclass(frozen=True)
class Failed:
    """A task without an answer, or a failed check of a server."""

    server: int
    error: Exception


class Asking:
    """Threads that send a server its tasks until they are stopped.

    The threads are daemons: one that waits for a server which hangs must not keep the process from ending.

    Args:
        server: Its number.
        ask: Returns the server's answers.
        look: Raises where the server has changed. /health would not do: a process in front of the engine answers it,
            also where the engine hangs.
        tell: Called with the result of each task, and with a failed check.
        hang_up: Ends the calls of `ask` and `look` in flight.
        threads: Most requests that wait at the same time.
    """

    def __init__(
        self,
        server: int,
        ask: Callable[[Task], list[Answer]],
        look: Callable[[], Any],
        tell: Callable[[Done | Failed], None],
        hang_up: Callable[[], None],
        threads: int,
    ) -> None:
        self._server, self._ask, self._look, self._tell, self._threads = server, ask, look, tell, threads
        self._hang_up = hang_up
        self._tasks = queue.SimpleQueue[Task | None]()
        self._stop = threading.Event()
        for _ in range(threads):
            threading.Thread(target=self._wait_for_answers, name=THREADS, daemon=True).start()
        threading.Thread(target=self._look_after, name=THREADS, daemon=True).start()

    def put(self, task: Task) -> None:
        self._tasks.put(task)

    def stop(self) -> None:
        """Send nothing more, and wait for nothing: a server that hangs would hold the threads for an hour."""
        self._stop.set()
        for _ in range(self._threads):
            self._tasks.put(None)
        self._hang_up()

    def _wait_for_answers(self) -> None:
        while (task := self._tasks.get()) is not None and not self._stop.is_set():
            try:
                self._tell(Done(self._server, task, self._ask(task)))
            except Exception as error:
                self._tell(Failed(self._server, error))

    def _look_after(self) -> None:
        while not self._stop.wait(_LOOK_EVERY):
            try:
                self._look()
            except Exception as error:
                self._tell(Failed(self._server, error))
                return
