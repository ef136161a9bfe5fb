"""The memory of this process in each phase of a run."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch


class PhaseMemory:
    """The peak memory of each phase, in bytes: of tensors on a GPU, else of the process.

    The peak of a phase is known if it is above all before it in this process. Otherwise the memory at its end counts,
    which is less: counters are not reset, as others use them too.
    """

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self._before: int | None = None

    def begin(self) -> None:
        """Begin a phase."""
        self._before = most_held()

    def end(self, phase: str) -> None:
        """End a phase. For one that an earlier process began, only the memory at its end is known."""
        most = most_held()
        rose = self._before is not None and most > self._before
        self.held[phase] = max(most if rose else held_now(), self.held.get(phase, 0))
        self._before = None


def most_held() -> int:
    """Return the peak memory since the process began, in bytes."""
    return torch.cuda.max_memory_allocated() if on_gpu() else process_peak()


def held_now() -> int:
    """Return the current memory in bytes; the peak where the system does not tell it."""
    if on_gpu():
        return torch.cuda.memory_allocated()
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else process_peak()


def process_peak() -> int:
    """Return the peak resident memory of the process in bytes; 0 on Windows, where it is unknown."""
    status = Path("/proc/self/status")
    if status.exists():  # `getrusage` includes the peak of the parent process
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.M)
        return 1024 * int(found[1]) if found else 0
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def on_gpu() -> bool:
    """Tell whether this process has had tensors on a GPU: Lightning initialises one for runs on the CPU too."""
    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.max_memory_allocated() > 0
