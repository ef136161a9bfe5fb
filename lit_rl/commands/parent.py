"""A rank that rank 0 has started ends with it. Standard library only: it is loaded before anything else.

Once ranks have met, one hears of another's end by a collective that fails. Before that it would wait for half an hour,
and a rank that decodes or scores hears of nothing. So a thread asks the system who the parent is: that changes when the
parent dies. Linux could send a signal then (PR_SET_PDEATHSIG), but at the end of the thread that started this process,
however that thread ended, and without time to write down why; and other systems have nothing like it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from lit_rl.errors import BackendError

STARTED_BY = "LIT_RL_STARTED_BY"
"""Variable in which rank 0 leaves its process id for the ranks that it starts."""

GRACE = 10.0
"""Seconds in which this process may end by itself, as where a collective fails: it knows more then."""

_EVERY = 0.5
"""Seconds between two checks."""

_over = threading.Event()
_gave_up: Callable[[BackendError], int] | None = None


def end_with_it() -> None:
    """Watch from now on, if rank 0 has started this process, that rank 0 is alive."""
    told = os.environ.pop(STARTED_BY, None)  # what this process starts is not rank 0's
    if told is None or os.environ.get("LOCAL_RANK", "0") == "0" or os.name != "posix":
        return
    threading.Thread(target=_watch, args=(int(told),), name="lit_rl-parent", daemon=True).start()


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Leave our process id for the ranks that are started in this block."""
    os.environ[STARTED_BY] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(STARTED_BY, None)


@contextlib.contextmanager
def missed(gave_up: Callable[[BackendError], int]) -> Iterator[None]:
    """Mark work that this process does together with rank 0. After it, it may write for as long as it takes: rank 0,
    which has finished its own part, may be gone.

    Args:
        gave_up: Writes the error down, and returns the exit code. Called in a thread.
    """
    global _gave_up
    _over.clear()  # set by the job of a sweep before this one
    _gave_up = gave_up
    try:
        yield
        _over.set()
    finally:
        _gave_up = None


def _watch(parent: int) -> None:
    directly = os.getppid() == parent  # or there is a script between, which has started this Python
    while os.getppid() == parent if directly else _is_there(parent):
        time.sleep(_EVERY)
    if _over.wait(GRACE if have_met() else 0.0):
        while _over.is_set():  # until another job needs rank 0
            time.sleep(_EVERY)
    error = BackendError(
        f"Process {parent}, which was rank 0 and had started this one ({os.getpid()}), is gone. Start the same command "
        "with ckpt_path=last: the run goes on from its newest checkpoint."
    )
    code = error.exit_code
    try:
        code = (_gave_up or _say)(error)
    finally:  # also where the terminal is gone, and nothing can be said
        os._exit(code)


def _is_there(process: int) -> bool:
    """Tell whether a process is alive; a zombie is not."""
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:  # there is no /proc, or it is somebody else's
        return True


def have_met() -> bool:
    """Tell whether the ranks have met, so that there may be a collective that fails."""
    is_initialized = getattr(
        sys.modules.get("torch.distributed"), "is_initialized", None
    )  # while it loads there is none
    return is_initialized is not None and is_initialized()


def _say(error: BackendError) -> int:
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    sys.stderr.flush()
    return error.exit_code
