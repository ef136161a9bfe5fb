"""Work that is given up where the run is asked to stop: a rollout, its rewards, the wait for a server.

Nothing has been learned from such work yet, so nothing is lost with it: a run that goes on does it anew. Three parties
meet here, and none of them imports another:

- Who catches signals (`callbacks.graceful_stop`) says what ends the run (`listen`), and that it is to end (`ask`).
- A hook of the training says that it may be left (`ends_the_run`). Elsewhere nothing is ever given up.
- Inside of a hook, work says that it may be given up (`may_be_given_up`).

A signal's handler runs in the main thread, between two steps of Python's interpreter, also where that thread sleeps or
waits for a lock, a socket or another thread. So `ask` raises `Interrupted` right there, out of the work. A decoding
loop, a reward function that hangs in the main thread and a wait for a server need no look at a flag for it; a single
call of compiled code first comes back.

Ranks have to leave the work together: one that is gone would let the others wait for it in a collective. So with
several of them work is given up only where they agree afterwards (`agreed`), and no collective may be inside
`may_be_given_up`, nor between such work and the place where all agree: a rank leaves its work, comes to that place, and
there all raise `Interrupted`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn


class Interrupted(KeyboardInterrupt):
    """Raised out of work that is given up because the run is asked to stop.

    A `KeyboardInterrupt`, also for other signals than Ctrl-C: functions that go on after any `Exception` do not go on
    after this one, and event loops of asyncio let it out.
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


def listen(end: Callable[[], NoReturn], *, several: bool) -> None:
    """Let work be given up from now on when `ask` requests a stop.

    Args:
        end: Saves and ends the run. Called outside of all work, on every rank.
        several: Whether the run has several ranks.
    """
    global _run
    _run = _Run(end, several)


def forget() -> None:
    """Let nothing be given up any more."""
    global _run
    _run = _Run()


def ask() -> None:
    """Request that the run stops. Called by a signal handler, in the main thread.

    Raises:
        Interrupted: the main thread is in work that may be given up.
    """
    _run.asked = True
    if _run.works:
        raise Interrupted


def is_working() -> bool:
    """Tell whether the main thread is in work that may be given up."""
    return _run.works > 0


def asked() -> bool:
    """Tell whether the run is to stop."""
    return _run.asked


def agree_to_stop() -> None:
    """Record that another rank received a stop request."""
    _run.asked = True


def agrees() -> bool:
    """Tell whether ranks have to agree after work. The same on every rank."""
    return _run.several and _run.hooks > 0


@contextmanager
def ends_the_run() -> Iterator[None]:
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
def agreed() -> Iterator[None]:
    """Mark work after which all ranks agree whether it is given up, or which belongs to one process."""
    _run.agreed += 1
    try:
        yield
    finally:
        _run.agreed -= _run.agreed > 0


@contextmanager
def may_be_given_up(*, alone: bool = True) -> Iterator[None]:
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
        _look(run)
        yield
        _look(run)  # the block may have caught everything
    finally:
        run.works -= run.works > 0


@contextmanager
def in_one_piece() -> Iterator[None]:
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
    _look(run)


def _look(run: _Run) -> None:
    if run.asked:
        raise Interrupted


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
