"""How much memory this process held in each phase of a run."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch


class PhaseMemory:
    """Bytes by phase: on a GPU that of tensors, otherwise that of the process.

    What a phase held at most is known where it held more than anything before it in this process. Otherwise it is what
    was held at its end, which is less: nothing is reset to find out more, as others count by the same counters.
    """

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self._before: int | None = None

    def begin(self) -> None:
        """A phase begins."""
        self._before = most_held()

    def end(self, phase: str) -> None:
        """It ends. Of one that an earlier process began, the end alone is known."""
        most = most_held()
        rose = self._before is not None and most > self._before
        self.held[phase] = max(most if rose else held_now(), self.held.get(phase, 0))
        self._before = None


def most_held() -> int:
    """Since the process began."""
    return torch.cuda.max_memory_allocated() if on_gpu() else process_peak()


def held_now() -> int:
    """At this moment; where the system does not say, what was held at most."""
    if on_gpu():
        return torch.cuda.memory_allocated()
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else process_peak()


def process_peak() -> int:
    """Bytes of the machine's memory; 0 on Windows, where nobody counts."""
    status = Path("/proc/self/status")
    if status.exists():  # `getrusage` has what the process held that started this one, if that is more
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.M)
        return 1024 * int(found[1]) if found else 0
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def on_gpu() -> bool:
    """Return whether this process has had tensors on a GPU: Lightning wakes one for a run on the CPU too."""
    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.max_memory_allocated() > 0
