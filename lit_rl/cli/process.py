"""Settings of a process before and while the libraries load: threads, tokenizers, freed memory, exit, and warnings of
other packages."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_rl.runs import rank_processes

# ---------------------------------------------------------------------- before libraries load, and at the end


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""A parameter of mallopt(3)."""


def prepare() -> None:
    """Set variables and streams that libraries read when they load. The user's own settings stay."""
    rank_processes.end_with_parent()
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


# ---------------------------------------------------------------------- warnings of other packages


_NOT_OURS = (
    r".*LeafSpec.*",
    r".*does not have many workers.*",
    r".*in eval mode.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*was configured so 100%.*",
    r".*`isinstance\(treespec.*",
    r".*GPU available but not used.*",
    r".*sync_dist=True.*",  # the module reduces by itself
    r".*have no logger configured.*",
    r"Total length of `list` across ranks is zero.*",  # no validation set, of which the data module tells
    r".*all_gather is deprecated.*",
    r"The dirpath has changed.*",
    r".*The total number of parameters detected may be inaccurate.*",
    r"Sparse invariant checks are implicitly disabled.*",  # torch before 2.13, though they are switched off by name
    r"`is_gradient_checkpointing` is deprecated.*",  # PEFT asks by the old name
    r".*FSDP2-wrapped module .* returned a view tensor.*",  # logits, never changed in place
)

_BANNERS = ("GPU available", "TPU available", "HPU available", "💡 Tip", "`Trainer", "Restor", "Loaded model weights")


def filter_warnings() -> None:
    """Silence these warnings, and the banners that Lightning and transformers write at every start; and escape control
    characters of the rest."""
    for pattern in _NOT_OURS:
        warnings.filterwarnings("ignore", message=pattern)
    if not isinstance(warnings.formatwarning, _Visible):
        warnings.formatwarning = _Visible(warnings.formatwarning)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_made_visible)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _made_visible(record: logging.LogRecord) -> bool:
    """Filter Lightning's lines: drop those of every start, and escape control characters of the others."""
    from lit_rl.callbacks.display import escape_control

    record.msg, record.args = escape_control(record.getMessage()), ()
    return not record.msg.startswith(_BANNERS)


class _Visible:
    """A writer of warnings like Lightning's that escapes control characters, in names of data and rewards.

    Under a warning of lit_rl stands no line of its source, which says nothing to a user.
    """

    def __init__(self, form: Any) -> None:
        self.form = form

    def __call__(self, message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        from lit_rl.callbacks.display import escape_control

        ours = Path(filename).is_relative_to(Path(__file__).parents[1])
        return escape_control(self.form(message, category, filename, lineno, "" if ours else line))


@contextlib.contextmanager
def without_root_handlers() -> Iterator[None]:
    """Hide the root logger's handlers in this block: Lightning, as it is imported, propagates its messages where there
    is one, and Hydra has added one by now: each message would come twice."""
    root = logging.getLogger()
    handlers, root.handlers[:] = list(root.handlers), []
    try:
        yield
    finally:
        root.handlers[:] = handlers
