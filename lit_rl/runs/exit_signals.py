"""Signals that end a command at once, with the exit code that names them, where nothing that is saved would be lost.

`exit_on_signal` is for commands with a Trainer, `exit_on_sigterm` for those without: what is half written or was
started goes with the command.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_rl.callbacks.graceful_stop import stop_signals
from lit_rl.callbacks.process_signals import LossyStream, detach_from_terminal, requeue_signal
from lit_rl.core import upstream
from lit_rl.core.errors import INTERRUPTED, SIGNALLED, TERMINATED, BackendError


class ExitBySignal(KeyboardInterrupt):
    """A signal to end. Neither an `Exception` nor a `SystemExit`, which a function's failure policy takes for a
    failure; and asyncio's event loops let it out."""


@contextlib.contextmanager
def exit_on_signal(trainer: L.Trainer, then: Callable[[int], None]) -> Iterator[None]:
    """Leave this block at a signal, from wherever the main thread stands in it, and then end the process.

    Processes that this one started for other ranks get the signal too. Lightning's own handler of SIGTERM stays away:
    outside of a fit it takes a note, which is read between two batches, and ends with exit code 0; of several ranks it
    asks for a collective in the middle of anything.

    Args:
        trainer: The Trainer, whose callbacks name the signals that end a run.
        then: Called on rank 0 with the number of the signal, behind the block and not in the handler, which may have
            come in the middle of a write.

    Raises:
        SystemExit: with 128 + the number of the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    asked = requeue_signal(trainer)

    def leave(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            detach_from_terminal()
        if received and number == asked:  # by Slurm, and by torchrun, which passes it on
            return
        if received:  # again, while it leaves
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(number)
        raise ExitBySignal

    before = {number: signal.signal(number, leave) for number in stop_signals(trainer)}
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(LossyStream, streams)
    try:
        with upstream.without_signal_handlers(trainer):
            yield
    except BaseException:
        if not received:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            # Lightning's other launchers start no processes to forward it to.
            getattr(trainer.strategy.launcher, "kill", lambda number: None)(received[0])
            if trainer.is_global_zero:
                then(received[0])
        sys.stdout, sys.stderr = streams
    if received:
        raise SystemExit(SIGNALLED + received[0])


@contextlib.contextmanager
def exits_as_errors(trainer: L.Trainer) -> Iterator[None]:
    """Turn an exit in the middle of a training into an error: of a callback that calls `sys.exit`, or of a Ctrl-C that
    only Lightning has caught. A run that did not come to its end must not exit with 0.

    Raises:
        BackendError: with the exit code that was asked for; 1 where that was none or 0.
    """
    try:
        yield
    except SystemExit as left:
        begun = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if not begun:  # Slurm takes a job back before it trains
            raise
        by = left.__context__ if isinstance(left.__context__, KeyboardInterrupt) else left
        interrupted, terminated = by is not left, isinstance(left, SIGTERMException)
        frame = traceback.extract_tb(by.__traceback__)[-1]
        what = "KeyboardInterrupt" if interrupted else f"{type(left).__name__}({left.code!r})"
        ended = BackendError(
            f"The training ended at step {trainer.global_step} by {what}, raised in {frame.filename}:{frame.lineno}. "
            "To end a run early and in order, a callback sets trainer.should_stop = True."
        )
        asked = left.code if isinstance(left.code, int) and left.code else 1
        ended.exit_code = INTERRUPTED if interrupted else TERMINATED if terminated else asked
        raise ended from left


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """End at SIGTERM by way of every `finally`, with its exit code; a second one is ignored meanwhile.

    Raises:
        SystemExit: with 128 + the number of the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
