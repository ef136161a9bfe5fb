"""What a process is set to before the libraries load: threads that wait, tokenizers, memory that was freed, an end that
is not waited for; and that a rank ends with rank 0, which has started it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
from pathlib import Path

from lit_rl.commands import parent

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Of mallopt(3)."""


def prepare() -> None:
    """Set variables and streams that libraries read when they load. The user's own settings stay."""
    parent.end_with_it()
    atexit.register(leave_the_heap)  # the first, so that it is called last
    # Forked tokenizers would warn at every start.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):  # in a locale without UTF-8 a prompt must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Threads that wait for each other spin for a moment only and then sleep. On a shared machine spinning made a step
    # several times slower; without any, a decoded token waits for threads to wake up (a tenth of a step).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if not _has_gpu() and not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        keep_freed_memory()


def open_what_is_closed() -> None:
    """Let an output that is closed (`>&-`) lose what is written there. The next file that is opened would be it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def let_go_of_output() -> None:
    """Write out what waits. Where that fails (a full disk, a pipe that nobody reads) it is lost.

    Python would try again at its end, and leave with another exit code than it was given.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def leave_the_heap() -> None:
    """Let the system take the objects of this process back at its end, instead of Python's collector, one by one.

    With vLLM there are a million: a run stayed for seconds after its last line, for half a minute on a busy machine.
    Open files are written out first, as the collector would have done.
    """
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):
            with contextlib.suppress(OSError, ValueError):  # the disk is full; it is closed
                each.flush()
    gc.freeze()


def keep_freed_memory() -> bool:
    """Let this process keep memory that it frees, for its next tensors; tell whether it does.

    By itself glibc gives tensors above 32 MiB back to the system, which then makes each page anew: gradients of a head,
    logits, the optimizer's working memory, every step. Nothing is done with another C library.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


def _has_gpu() -> bool:
    """Tell whether there is a driver: then the host's memory is not a step's working memory, and weights on their way
    pass it once."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))
