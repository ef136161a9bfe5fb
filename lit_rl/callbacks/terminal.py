"""Outputs that fail while a run writes to them, such as a lost terminal, without ending the run."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any


class Terminal:
    """A stream that drops text it cannot write.

    The terminal may be lost, with SIGHUP on its way; the reader of a pipe may have left; a disk may be full.

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
    """Redirect output to /dev/null: writing to a lost terminal would end the process before it has saved."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        mode = os.fstat(descriptor).st_mode  # `isatty` is false for a lost terminal; a pipe's reader is lost with it
        if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
