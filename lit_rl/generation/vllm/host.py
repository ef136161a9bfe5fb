"""Folders in this machine's memory, from which other processes read weights."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_YOUNG = 60.0
"""Seconds in which a new folder may not be locked yet by the process that made it."""


@contextmanager
def folder_in_memory(prefix: str, root: str | None = None) -> Iterator[Path]:
    """Yield a folder that other processes read, in memory where that is possible; it is removed afterwards.

    A process that is killed leaves its own behind, so unlocked ones are removed first.

    Args:
        prefix: The start of its name, and of the names of old ones.
        root: The parent folder; None is `shared_memory`, or else the folder of temporary files.
    """
    root = root or shared_memory() or tempfile.gettempdir()
    for left in Path(root).glob(f"{prefix}*"):
        with suppress(OSError), _opened(left) as held:  # another user's, or it is in use
            if time.time() - os.fstat(held).st_ctime > _YOUNG:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root) as folder, _opened(Path(folder)) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield Path(folder)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Open a folder's descriptor. The lock of a process that is killed is released with it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def shared_memory() -> str | None:
    """Return a folder in memory that other processes of this machine read; None where there is none, and a disk has to
    do."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
