"""An output that takes no more while a run writes to it, such as a terminal that is gone, does not end the run."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any


class Terminal:
    """A stream that a run tells what it does. What cannot be written there is lost: a terminal is gone, and the signal
    that says so is on its way; the reader of a pipe has left; a disk is full.

    Args:
        stream: `sys.stdout` or `sys.stderr`.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def let_go_of_the_terminal() -> None:
    """Write nowhere from now on: to write to a terminal that is gone would end the process before it has saved."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        mode = os.fstat(descriptor).st_mode  # `isatty` says no of a terminal that is gone; a pipe's reader goes with it
        if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
