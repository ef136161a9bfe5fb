"""Interrupts of work in the main thread: when the run is asked to stop, and when a time limit is over.

Work that can be given up is a rollout, its rewards, the wait for a server: nothing has been learned from it yet,
so a resumed run does it again. Three parties meet here, and none of them imports another:

- The signal handlers (`callbacks.graceful_stop`) register how to end the run (`enable_interrupts`) and request the stop
  (`request_stop`).
- A hook of the training declares that it may be left (`run_ending_hook`). Elsewhere nothing is ever given up.
- Inside a hook, work declares that it may be given up (`interruptible`).

A signal handler runs in the main thread, between two steps of Python's interpreter, also while that thread
sleeps or waits for a lock, a socket or another thread. So `request_stop` raises `Interrupted` right there, out
of the work. A decoding loop, a hanging reward function in the main thread and a wait for a server need not poll
a flag; a single call of compiled code returns first.

Ranks have to leave the work together: one that is gone would let the others wait for it in a collective. So
several ranks give work up only where they agree afterwards (`agreed_by_ranks`), and no collective may be inside
`interruptible`, nor between such work and the place where all agree: a rank leaves its work, comes to that
place, and there all raise `Interrupted`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from lit_rl.core.errors import ConfigError


class Interrupted(KeyboardInterrupt):
    """The interruption of work because the run is asked to stop.

    A `KeyboardInterrupt`, also for other signals than Ctrl-C: code that catches every `Exception` does not catch it,
    and event loops of asyncio let it through.
    """


@dataclass
class _Run:
    """The state of the run in this process."""

    end: Callable[[], NoReturn] | None = None
    """Ends the run, saved. None: no signal handler is installed."""
    several: bool = False
    """True if there are other ranks."""
    asked: bool = False
    hooks: int = 0
    agreed: int = 0
    works: int = 0
    """Depths at which the main thread is inside hooks that may be left, work that ranks agree on, work that may be
    given up."""


_run = _Run()


def enable_interrupts(end: Callable[[], NoReturn], *, several: bool) -> None:
    """Let work be given up from now on when `request_stop` requests a stop.

    Args:
        end: Saves and ends the run. Called outside of all work, on every rank.
        several: Whether the run has several ranks.
    """
    global _run
    _run = _Run(end, several)


def disable_interrupts() -> None:
    """Let nothing be given up any more."""
    global _run
    _run = _Run()


def request_stop() -> None:
    """Request that the run stops. Called by a signal handler, in the main thread.

    Raises:
        Interrupted: the main thread is in work that may be given up.
    """
    _run.asked = True
    if _run.works:
        raise Interrupted


def is_interruptible() -> bool:
    """Tell whether the main thread is in work that may be given up."""
    return _run.works > 0


def stop_requested() -> bool:
    """Tell whether the run is to stop."""
    return _run.asked


def record_stop_request() -> None:
    """Record that another rank received a stop request."""
    _run.asked = True


def ranks_must_agree() -> bool:
    """Tell whether ranks have to agree after work. The same on every rank."""
    return _run.several and _run.hooks > 0


@contextmanager
def run_ending_hook() -> Iterator[None]:
    """Mark a hook of the training that may be left, in the main thread: `Interrupted` ends the run, saved."""
    run, end = _run, _run.end
    if end is None or not _in_main_thread():
        yield
        return
    run.hooks += 1
    try:
        yield
    except Interrupted:
        run.works = run.agreed = run.hooks = 0  # wherever the signal arrived: from now on no work is left
        end()
    finally:
        run.hooks -= run.hooks > 0  # no call, after which the handler of a signal might run


@contextmanager
def agreed_by_ranks() -> Iterator[None]:
    """Mark work after which all ranks agree whether it is given up, or which belongs to one process."""
    _run.agreed += 1
    try:
        yield
    finally:
        _run.agreed -= _run.agreed > 0


@contextmanager
def interruptible(*, alone: bool = True) -> Iterator[None]:
    """Mark work that may be left at any point; in a thread beside the main one it goes on.

    Args:
        alone: It has no collective. Other work is left only where there is one rank.

    Raises:
        Interrupted: the run was asked to stop, before or meanwhile.
    """
    run = _run
    if not run.hooks or not _in_main_thread() or (run.several and not (alone and run.agreed)):
        yield
        return
    try:
        run.works += 1
        _raise_if_requested(run)
        yield
        _raise_if_requested(run)  # the block may have caught everything
    finally:
        run.works -= run.works > 0


@contextmanager
def uninterruptible() -> Iterator[None]:
    """Mark a short part of such work that is completed first, because it would be useless if left halfway.

    Raises:
        Interrupted: after it, if the run was asked to stop meanwhile.
    """
    run, works = _run, _run.works
    if not works or not _in_main_thread():
        yield
        return
    run.works = 0
    try:
        yield
    finally:
        run.works = works
    _raise_if_requested(run)


def _raise_if_requested(run: _Run) -> None:
    if run.asked:
        raise Interrupted


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class TimeLimitExceeded(BaseException):
    """The end of a time limit. No `Exception`: code that catches every `Exception` does not catch it."""


@contextmanager
def time_limit(seconds: float | None, key: str) -> Iterator[None]:
    """Interrupt the block when its time is over, by the alarm signal of the process.

    Waiting (for a socket, a lock, a sleep) is interrupted at once; a call of compiled code returns first.

    Args:
        seconds: None is no limit.
        key: The setting of the limit, for messages.

    Raises:
        TimeLimitExceeded: in the block, and out of it.
        ConfigError: this is not the main thread, or the system has no such signal.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        raise ConfigError(
            f"{key}={seconds:g} is kept by an alarm signal, which reaches the main thread of a process on Linux and "
            "macOS alone: train there, or leave it out and limit the function inside."
        )
    inside = True

    def over(number: int, frame: Any) -> None:
        if inside:
            raise TimeLimitExceeded

    before = signal.signal(signal.SIGALRM, over)
    others, begun = signal.setitimer(signal.ITIMER_REAL, seconds), time.monotonic()
    try:
        yield
    finally:
        inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if others[0]:  # an earlier alarm: restore its remaining time
            signal.setitimer(signal.ITIMER_REAL, max(others[0] - (time.monotonic() - begun), 1e-3), others[1])
