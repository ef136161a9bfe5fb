"""A rank that fails among others: the one that failed first is heard, and no process stays behind."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from lit_rl.errors import LitRLError

_GRACE = 10.0
"""Seconds that processes have to end by themselves: their next collective fails."""

_LAST = 30.0
"""Seconds that they have to end where all is done."""


class OtherRankFailed(LitRLError):
    """Another rank failed before this one, which heard of it by a lost connection. Its exit code is this one's too.

    Args:
        said: What that rank wrote down: `error.json`.
    """

    def __init__(self, said: Mapping[str, Any]) -> None:
        self.exit_code = said["exit_code"]
        words = said["traceback"] if said["exit_code"] == 1 else f"{said['error']}: {said['message']}"
        super().__init__(f"rank {said['rank']} on {said['host']} failed first:\n{words}")


def wait_for_those_started(launcher: Any, seconds: float = _LAST) -> None:
    """Let the processes that this one started end too, where it has done its work: the next job of a sweep finds none.

    Args:
        launcher: As below.
        seconds: Until one that hangs while it ends is left alone.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        for process in _started(launcher):
            process.wait(seconds)


def stop_lightnings_observer() -> None:
    """Keep Lightning from killing this process, where it has failed and ends by itself.

    A thread of Lightning's looks every five seconds, and kills this process once one that it started has failed. By
    then this one has failed too, and is writing down why.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []  # it looks at none, and has nothing else to do


def end_those_started(launcher: Any, grace: float = _GRACE) -> None:
    """End the processes that this one started for other ranks, where it has failed.

    Args:
        launcher: Lightning's, of the strategy; one that starts no processes is let alone.
        grace: Seconds until those that are still there are killed.
    """
    until = time.monotonic() + grace
    for process in _started(launcher):
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _started(launcher: Any) -> list[subprocess.Popen[Any]]:
    """Without those that it forks or spawns, and joins by itself."""
    return [process for process in getattr(launcher, "procs", ()) if isinstance(process, subprocess.Popen)]
