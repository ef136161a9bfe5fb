"""The process that vLLM is a guest in: what it changes there is put back. And the host's memory, which files lie in."""

from __future__ import annotations

import fcntl
import logging
import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch


@contextmanager
def undisturbed(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Restore on the way out what vLLM changes in its process.

    Those are the global random states (it seeds them when it starts, and every sampling call moves torch's), the number
    of threads and `torch.set_num_threads` itself (replaced by a function that only warns), the default type of tensors,
    the current GPU, and environment variables (a preloaded OpenMP, compiler threads, how processes are started).

    Args:
        environment: Variables that vLLM needs, where they are not set already. They stay set: vLLM reads them again
            and again.
    """
    for name, value in (environment or {}).items():
        os.environ.setdefault(name, value)
    variables, dtype = dict(os.environ), torch.get_default_dtype()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    python, numpy = random.getstate(), np.random.get_state()
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    quiet = logging.getLogger("torch._library.triton")
    level = quiet.level
    try:
        quiet.setLevel(logging.ERROR)  # that there is no Triton on a CPU is no news
        with torch.random.fork_rng(devices=cuda), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        quiet.setLevel(level)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            set_num_threads(threads)
        torch.set_default_dtype(dtype)
        if device is not None:
            torch.cuda.set_device(device)
        for name in set(os.environ) - set(variables):
            del os.environ[name]
        os.environ.update({name: value for name, value in variables.items() if os.environ.get(name) != value})


_YOUNG = 60.0
"""Seconds in which a folder may not be held yet by who has just made it."""


@contextmanager
def folder_in_memory(prefix: str, root: str | None = None) -> Iterator[Path]:
    """A folder that other processes read, in memory where that is possible; it is gone afterwards.

    A process that is killed leaves its own behind, so those that nobody holds any more are removed first.

    Args:
        prefix: Of its name, and of the names of those that are looked for.
        root: Where it is made; None is `shared_memory`, or else the folder of temporary files.
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
    """Its descriptor. The lock of a process that is killed goes with it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def shared_memory() -> str | None:
    """A folder in memory that other processes of this machine read; None where there is none: a disk's will do."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
