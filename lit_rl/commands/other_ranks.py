"""A rank that fails among others: the one that failed first is heard, and no process stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lit_rl.commands import parent
from lit_rl.errors import SIGNALLED, BackendError, LitRLError

if TYPE_CHECKING:
    import lightning as L

_GRACE = 10.0
"""Seconds that processes have to end by themselves: their next collective fails."""

_LAST = 30.0
"""Seconds that they have to end after all work is done."""

_EVERY = 0.5
"""Seconds between two checks of the child processes. Lightning's own first check is after five."""

_TO_END = 5.0
"""Seconds from a lost connection to the end of the process at its other end."""

_TO_HEAR = 120.0
"""Seconds that this process has to notice the loss of another one, by a collective that fails, and to leave its work,
which may be a checkpoint or an export that it writes alone."""

_known: list[subprocess.Popen[Any]] = []
"""All processes that this one has started for other ranks: later jobs of a sweep have the same ones, and no
launcher."""

_ended_with: list[subprocess.Popen[Any]] = []
"""Children that were ended with a job that failed."""


class OtherRankFailed(LitRLError):
    """Failure of another rank before this one, which noticed a lost connection. Its exit code is this one's too.

    Args:
        said: That rank's `error.json`.
    """

    def __init__(self, said: Mapping[str, Any]) -> None:
        self.exit_code = said["exit_code"]
        words = said["traceback"] if said["exit_code"] == 1 else f"{said['error']}: {said['message']}"
        super().__init__(f"rank {said['rank']} on {said['host']} failed first:\n{words}")


def wait_for_those_started(launcher: Any, seconds: float = _LAST) -> None:
    """Wait for the child processes to end too, after this one's work is done: the next job of a sweep finds none.

    Args:
        launcher: Lightning's, of the strategy.
        seconds: Until one that hangs while it ends is left alone.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        for process in _started(launcher):
            process.wait(seconds)


@contextlib.contextmanager
def watching_those_started(
    trainer: L.Trainer, gave_up: Callable[[BackendError], int], seconds: float = _TO_HEAR
) -> Iterator[None]:
    """End this process with a reason if a child process of another rank fails.

    Lightning kills this one, which then leaves no word. Here it has time to hear of it: a collective of gloo fails at
    once. One that stands where nothing fails, as in a collective of NCCL or where the ranks meet, is ended. Those that
    this one starts know of it, and end with it (`commands.parent`).

    Args:
        trainer: The Trainer; its launcher starts processes.
        gave_up: Writes the error down, and returns the exit code. Called in a thread.
        seconds: Until this process is ended; where the ranks have not met yet it has nothing to lose, and has less.

    Raises:
        BackendError: an earlier job of this sweep has ended the others.
    """
    if _ended_with and not _known and trainer.strategy.launcher is None and trainer.world_size > 1:
        raise BackendError(
            "The processes of the other ranks have ended with an earlier job of this sweep, which failed. Start the "
            "jobs that are left as a sweep of their own."
        )
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(trainer, over, gave_up, seconds), name="lit_rl-other-ranks")
    watch.daemon = True
    watch.start()
    try:
        starts = trainer.strategy.launcher is not None
        with parent.told() if starts else contextlib.nullcontext(), parent.missed(gave_up):
            yield
    finally:
        over.set()


def _watch(trainer: L.Trainer, over: threading.Event, gave_up: Callable[[BackendError], int], seconds: float) -> None:
    while not over.wait(_EVERY):
        started = _started(trainer.strategy.launcher)
        _known.extend(process for process in started if process not in _known)
        if _known:
            stop_lightnings_observer()
        if (failed := _failed()) is None:
            continue
        given = seconds if parent.have_met() else min(seconds, _GRACE)
        if over.wait(given):
            return
        code = BackendError.exit_code
        try:
            code = gave_up(
                BackendError(
                    f"{_how_it_ended(failed, trainer.global_rank)}, and for {given:.0f} s this one has not heard of "
                    "it: it stands where nothing fails. Start the same command with ckpt_path=last: the run goes on "
                    "from its newest checkpoint."
                )
            )
        finally:  # also where the terminal is gone, and nothing can be said
            for process in _known:
                process.kill()
            os._exit(code)


def _failed() -> subprocess.Popen[Any] | None:
    """Return the first child that has ended with an error. One that a signal has ended in good order is none: this one
    ends too."""
    ended = (each for each in _known if each.poll())
    return next((each for each in ended if not SIGNALLED < each.returncode <= SIGNALLED + signal.NSIG), None)


def how_one_ended(rank: int, seconds: float = _TO_END) -> tuple[str, bool] | None:
    """Return the reason why another rank ended, if this process has started it and has lost the connection to it.

    Args:
        rank: Rank of this process.
        seconds: Time for a process to end whose connections are closed.

    Returns:
        A clause with its rank and its process, and whether a signal killed it: then it said nothing itself. None where
        every one that this process started is there, or ended in good order.
    """
    until = time.monotonic() + seconds
    while any(each.poll() is None for each in _known) and not _killed() and time.monotonic() < until:
        time.sleep(_EVERY / 10)
    failed = _killed() or _failed()
    return None if failed is None else (_how_it_ended(failed, rank), failed.returncode < 0)


def _killed() -> subprocess.Popen[Any] | None:
    """Return the first child that a signal killed: where several ended, the others have lost their connection to it."""
    return next((each for each in _known if (each.poll() or 0) < 0), None)


def _how_it_ended(process: subprocess.Popen[Any], rank: int) -> str:
    """Return a clause about the end of a child. Lightning starts the ranks of a node in their order."""
    who = f"Rank {rank + 1 + _known.index(process)} (process {process.pid})"
    if process.returncode < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-process.returncode).name
            of_memory = ", as the kernel does when memory is out" if name == "SIGKILL" else ""
            return f"{who} was killed by {name}{of_memory}"
    return f"{who} has ended with exit code {process.returncode}"


def stop_lightnings_observer() -> None:
    """Keep Lightning from killing this process, which ends by itself where another one fails.

    A thread of Lightning's looks every five seconds, and kills this process once one that it started has failed.
    """
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []  # it looks at none, and has nothing else to do


def end_those_started(launcher: Any, grace: float = _GRACE) -> None:
    """End the child processes of other ranks, after this one has failed.

    Args:
        launcher: Lightning's, of the strategy; one that starts no processes is let alone.
        grace: Seconds until those that are still there are killed.
    """
    until = time.monotonic() + grace
    started = _started(launcher) or list(_known)  # a later job of a sweep has no launcher
    for process in started:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _ended_with.extend(started)
    _known.clear()


def _started(launcher: Any) -> list[subprocess.Popen[Any]]:
    """Return a launcher's child processes, without those that it forks or spawns, and joins by itself."""
    return [process for process in getattr(launcher, "procs", ()) if isinstance(process, subprocess.Popen)]
