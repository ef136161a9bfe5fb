"""What a process holds after more and more episodes: threads, processes, open files, memory."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_LEAST, _MOST = 4, 40
"""Fewest and most episodes between two measurements: below the first there is no result."""
_FROM = {"threads": 0.1, "child processes": 0.1, "open files": 0.1, "Python objects": 20.0, "KiB of memory": 32.0}
"""Least growth an episode that is reported. Anything rarer may be a pool that fills; a run has hundreds of thousands
of episodes."""


@dataclass(frozen=True)
class Growth:
    """Resources that grew over two equal numbers of episodes."""

    episodes: int
    """Episodes of each half; 0: they take too long to measure."""
    grown: dict[str, float]
    """Growth an episode, by resource, where it grew in both halves."""


def growth(play: Callable[[int], None], cases: int, budget: float) -> Growth:
    """Play episodes, and measure the resources of the process before, halfway and after.

    Args:
        play: Plays an episode of the case with this number, and keeps nothing.
        cases: Number of cases.
        budget: Seconds for all of it, about.
    """
    began = time.perf_counter()
    for number in range(cases):  # what is loaded or filled once
        play(number)
    spent = time.perf_counter() - began
    rounds = min(math.ceil(_MOST / cases), int((budget - spent) / spent / 2))
    if (episodes := rounds * cases) < _LEAST:
        return Growth(0, {})
    looks = [held()]
    for _ in range(2):
        for number in range(episodes):
            play(number % cases)
        looks.append(held())
    grown = {name: min(b[name] - a[name] for a, b in pairwise(looks)) / episodes for name in looks[0]}
    return Growth(episodes, {name: each for name, each in grown.items() if each >= _FROM[name]})


def held() -> dict[str, float]:
    """Return the resources of this process: counts, and KiB of memory of its own. Cyclic garbage is collected
    before."""
    gc.collect()
    _give_back()  # else what leaks fills memory that was freed before, unseen
    # Small blocks of Python's own allocator: counting them costs nothing, unlike tracing each.
    held: dict[str, float] = {"threads": threading.active_count(), "Python objects": sys.getallocatedblocks()}
    process = Path("/proc/self")
    if process.is_dir():  # Linux
        held["open files"] = len(os.listdir(process / "fd"))
        held["KiB of memory"] = _kept_kib((process / "status").read_text())
        held["child processes"] = sum(len(_children(task).split()) for task in (process / "task").iterdir())
    return held


def _kept_kib(status: str) -> float:
    """Return KiB of the process's own memory. Pages of files (libraries) come and go as the system likes."""
    return float(sum(map(int, re.findall(r"^(?:RssAnon|RssShmem|VmSwap):\s+(\d+) kB", status, re.M))))


def _give_back() -> None:
    """Return the pages of freed memory to the system, where the C library can (glibc)."""
    if sys.platform.startswith("linux") and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _children(task: Path) -> str:
    try:
        return (task / "children").read_text()
    except OSError:  # a thread that has just ended, or a kernel that does not say
        return ""
