"""Processes of ranks that end together: rank 0 watches those that it started, and each of them watches rank 0.

Loaded before anything else, so it imports the standard library and light files of `lit_rl.core` only.

Once ranks have met, one hears of another's end by a collective that fails. Before that it would wait for half an hour,
and a rank that decodes or scores hears of nothing. So a thread asks the system for the parent's process id, which
changes when the parent dies. Linux could send a signal then (PR_SET_PDEATHSIG), but at the end of the thread that
started this process, however that thread ended, and without time to write down why; and other systems have nothing like
it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lit_rl.core import upstream
from lit_rl.core.errors import SIGNALLED, BackendError, LitRLError
from lit_rl.core.processes import how_ended, is_alive

if TYPE_CHECKING:
    import lightning as L


# ---------------------------------------------------------------------- a rank watches rank 0


STARTED_BY = "LIT_RL_STARTED_BY"
"""Variable in which rank 0 leaves its process id for the ranks that it starts."""

PARENT_GRACE = 10.0
"""Seconds in which this process may end by itself, as where a collective fails: it knows more then."""

_PARENT_INTERVAL = 0.5
"""Seconds between two checks."""

_over = threading.Event()

_on_loss: Callable[[BackendError], int] | None = None


def end_with_parent() -> None:
    """Watch from now on, if rank 0 has started this process, that rank 0 is alive."""
    parent = os.environ.pop(STARTED_BY, None)  # what this process starts is not rank 0's
    if parent is None or os.environ.get("LOCAL_RANK", "0") == "0" or os.name != "posix":
        return
    threading.Thread(target=_watch_parent, args=(int(parent),), name="lit_rl-parent", daemon=True).start()


@contextlib.contextmanager
def announce_pid() -> Iterator[None]:
    """Leave our process id for the ranks that are started in this block."""
    os.environ[STARTED_BY] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(STARTED_BY, None)


@contextlib.contextmanager
def while_parent_matters(on_loss: Callable[[BackendError], int]) -> Iterator[None]:
    """Mark work that this process does together with rank 0. After it, it may write for as long as it takes: rank 0,
    which has finished its own part, may be gone.

    Args:
        on_loss: Records the error, and returns the exit code. Called in a thread.
    """
    global _on_loss
    _over.clear()  # set by the job of a sweep before this one
    _on_loss = on_loss
    try:
        yield
        _over.set()
    finally:
        _on_loss = None


def _watch_parent(parent: int) -> None:
    directly = os.getppid() == parent  # or there is a script between, which has started this Python
    while os.getppid() == parent if directly else is_alive(parent):
        time.sleep(_PARENT_INTERVAL)
    if _over.wait(PARENT_GRACE if ranks_have_met() else 0.0):
        while _over.is_set():  # until another job needs rank 0
            time.sleep(_PARENT_INTERVAL)
    error = BackendError(
        f"Process {parent}, rank 0, which had started this one ({os.getpid()}), has died. Start the same command with "
        "ckpt_path=last to resume the run from its newest checkpoint."
    )
    code = error.exit_code
    try:
        on_loss = _on_loss  # once: the main thread may end meanwhile
        if on_loss is not None:
            code = on_loss(error)
        else:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.stderr.flush()
    finally:  # also where the terminal is gone, and nothing can be said
        os._exit(code)


def ranks_have_met() -> bool:
    """Tell whether the ranks have met, so that there may be a collective that fails."""
    is_initialized = getattr(
        sys.modules.get("torch.distributed"), "is_initialized", None
    )  # while it loads there is none
    return is_initialized is not None and is_initialized()


# ---------------------------------------------------------------------- rank 0 watches its children


_EXIT_GRACE = 10.0
"""Seconds that processes have to end by themselves: their next collective fails."""

_EXIT_TIMEOUT = 30.0
"""Seconds that they have to end after all work is done."""

_CHILD_INTERVAL = 0.5
"""Seconds between two checks of the child processes. Lightning's own first check is after five."""

_LOST_TO_EXIT = 5.0
"""Seconds from a lost connection to the end of the process at its other end."""

_LOSS_NOTICED_WITHIN = 120.0
"""Seconds that this process has to notice the loss of another one, by a collective that fails, and to leave its work,
which may be a checkpoint or an export that it writes alone."""

_children: list[subprocess.Popen[Any]] = []
"""All processes that this one has started for other ranks: later jobs of a sweep have the same ones, and no
launcher."""

_ended_children: list[subprocess.Popen[Any]] = []
"""Children that were ended with a job that failed."""


@contextlib.contextmanager
def watching_children(
    trainer: L.Trainer, on_loss: Callable[[BackendError], int], seconds: float = _LOSS_NOTICED_WITHIN
) -> Iterator[None]:
    """End this process with a reason if a child process of another rank fails.

    Lightning kills this one, which then leaves no message. Here it has time to notice it: a collective of gloo fails at
    once. One that stands where nothing fails, as in a collective of NCCL or where the ranks meet, is ended. Those that
    this one starts notice it, and end with it (`end_with_parent`).

    Args:
        trainer: The Trainer; its launcher starts processes.
        on_loss: Records the error, and returns the exit code. Called in a thread.
        seconds: Until this process is ended; where the ranks have not met yet it has nothing to lose, and has less.

    Raises:
        BackendError: an earlier job of this sweep has ended the others.
    """
    if _ended_children and not _children and trainer.strategy.launcher is None and trainer.world_size > 1:
        raise BackendError(
            "The processes of the other ranks have ended with an earlier job of this sweep, which failed. Start the "
            "jobs that are left as a sweep of their own."
        )
    over = threading.Event()
    watch = threading.Thread(target=_watch_children, args=(trainer, over, on_loss, seconds), name="lit_rl-other-ranks")
    watch.daemon = True
    watch.start()
    try:
        starts = trainer.strategy.launcher is not None
        with announce_pid() if starts else contextlib.nullcontext(), while_parent_matters(on_loss):
            yield
    finally:
        over.set()


def _watch_children(
    trainer: L.Trainer, over: threading.Event, on_loss: Callable[[BackendError], int], seconds: float
) -> None:
    while not over.wait(_CHILD_INTERVAL):
        started = _children_of(trainer.strategy.launcher)
        _children.extend(process for process in started if process not in _children)
        if _children:
            upstream.disarm_lightning_observer()
        if (failed := _first_failed()) is None:
            continue
        grace = seconds if ranks_have_met() else min(seconds, _EXIT_GRACE)
        if over.wait(grace):
            return
        code = BackendError.exit_code
        try:
            code = on_loss(
                BackendError(
                    f"{_exit_clause(failed, trainer.global_rank)}, and this one has not noticed in {grace:.0f} s: it "
                    "waits where no connection fails. Start the same command with ckpt_path=last to resume the run "
                    "from its newest checkpoint."
                )
            )
        finally:  # also where the terminal is gone, and nothing can be said
            for process in _children:
                process.kill()
            os._exit(code)


def _children_of(launcher: Any) -> list[subprocess.Popen[Any]]:
    """Return a launcher's child processes, without those that it forks or spawns, and joins by itself."""
    return [process for process in getattr(launcher, "procs", ()) if isinstance(process, subprocess.Popen)]


def _first_failed() -> subprocess.Popen[Any] | None:
    """Return the first child that has ended with an error.

    One that ended in good order after a signal (exit code 128 + signal) does not count; one that a signal killed does.
    """
    ended = (each for each in _children if each.poll())
    return next((each for each in ended if not SIGNALLED < each.returncode <= SIGNALLED + signal.NSIG), None)


# ---------------------------------------------------------------------- how they end


class OtherRankFailed(LitRLError):
    """Failure of another rank before this one, which noticed a lost connection. Its exit code is this one's too.

    Args:
        record: That rank's `error.json`.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.exit_code = record["exit_code"]
        reason = record["traceback"] if record["exit_code"] == 1 else f"{record['error']}: {record['message']}"
        super().__init__(f"rank {record['rank']} on {record['host']} failed first:\n{reason}")


def child_exit_reason(rank: int, seconds: float = _LOST_TO_EXIT) -> tuple[str, bool] | None:
    """Return the reason why another rank ended, if this process has started it and has lost the connection to it.

    Args:
        rank: Rank of this process.
        seconds: Time for a process to end whose connections are closed.

    Returns:
        A clause with its rank and its process, and whether a signal killed it: then it said nothing itself. None where
        every one that this process started is there, or ended in good order.
    """
    until = time.monotonic() + seconds
    while any(each.poll() is None for each in _children) and not _first_killed() and time.monotonic() < until:
        time.sleep(_CHILD_INTERVAL / 10)
    failed = _first_killed() or _first_failed()
    return None if failed is None else (_exit_clause(failed, rank), failed.returncode < 0)


def _first_killed() -> subprocess.Popen[Any] | None:
    """Return the first child that a signal killed: where several ended, the others have lost their connection to it."""
    return next((each for each in _children if (each.poll() or 0) < 0), None)


def _exit_clause(process: subprocess.Popen[Any], rank: int) -> str:
    """Return a clause about the end of a child. Lightning starts the ranks of a node in their order."""
    return f"Rank {rank + 1 + _children.index(process)} (process {process.pid}) {how_ended(process.returncode)}"


def wait_for_children(launcher: Any, seconds: float = _EXIT_TIMEOUT) -> None:
    """Wait for the child processes to end too, after this one's work is done: the next job of a sweep finds none.

    Args:
        launcher: Lightning's, of the strategy.
        seconds: Until one that hangs while it ends is left alone.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        for process in _children_of(launcher):
            process.wait(seconds)


def end_children(launcher: Any, grace: float = _EXIT_GRACE) -> None:
    """End the child processes of other ranks, after this one has failed.

    Args:
        launcher: Lightning's, of the strategy; one that starts no processes is let alone.
        grace: Seconds until those that are still there are killed.
    """
    until = time.monotonic() + grace
    started = _children_of(launcher) or list(_children)  # a later job of a sweep has no launcher
    for process in started:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _ended_children.extend(started)
    _children.clear()
