"""A disk without room, by the kernel's own word."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The kernel lets this process write no longer file, in bytes."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@contextmanager
def small_disk(folder: Path, size: int, how: str = "rw") -> Iterator[None]:
    """A disk of its own at a new folder, full after so many bytes; `ro`: that nobody may write. Skips the test where
    this process may mount none."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},{how}", "none", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a disk of its own is mounted, which takes root: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, but: int = 0) -> Path:
    """Take the room of a disk, but so many bytes. Returns the file that does: without it there is room again."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(max(0, file.tell() - but))
    return ballast
