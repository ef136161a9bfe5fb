"""What a worker process prints."""

from __future__ import annotations

import os

KEPT = 2000
"""Characters of a call's output that are kept: as many from its start as from its end, half each."""


class WorkerOutput:
    """The output of a process, read as fast as it comes; only its first and last part are kept."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._clear()

    def _clear(self) -> None:
        self.first, self.last, self.total = b"", b"", 0

    def read(self) -> bool:
        """Read available output, up to 64 KiB, without waiting; return False if there was none."""
        try:
            data = os.read(self.fd, 65536)
        except BlockingIOError:
            return False
        self.total += len(data)
        room = KEPT // 2 - len(self.first)
        self.first += data[:room]
        self.last = (self.last + data[room:])[-KEPT // 2 :]
        return bool(data)

    def take(self) -> str:
        """Return the output since the last time, shortened."""
        for _ in range(16):  # a pipe's worth; a process that prints without end has no last word
            if not self.read():
                break
        left_out = self.total - len(self.first) - len(self.last)
        middle = f"\n... ({left_out} bytes left out) ...\n" if left_out else ""
        text = self.first.decode(errors="replace") + middle + self.last.decode(errors="replace")
        self._clear()
        return text


def quote_output(output: str) -> str:
    """Return the worker's output as part of a message; empty if there is none."""
    return f" (it printed: {output.strip()!r})" if output.strip() else ""
