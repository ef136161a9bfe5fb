"""Signals: a table of their effects in each phase of a command, and the handlers outside of the training.

| Phase                                 | SIGINT       | SIGTERM    | SIGHUP     | Slurm's       | a second one |
|---------------------------------------|--------------|------------|------------|---------------|--------------|
| start: `requeue_before_training`      | Python's     | killed     | killed     | requeue, exit | the same     |
| first and last validation, export of  |              |            |            |               |              |
| a training: `exit_on_signal`          | exit         | exit       | exit       | requeue, exit | killed       |
| training: `callbacks.GracefulStop`    | stop, export | stop       | stop       | stop, requeue | exit         |
| `eval` and the like: `exit_on_signal` | exit         | exit       | exit       | exit          | killed       |
| `export`, `serve`: `exit_on_sigterm`  | Python's     | exit       | killed     | killed        | ignored      |

A second signal in a training goes to the handlers of before: those of `lit-rl train` exit, others are Lightning's. An
exit, or a Ctrl-C, that only Lightning catches is an error (`exits_as_errors`).

"Stop" finishes an optimizer step, gives other work up (`core.interrupts`), saves, and then exits. "Exit" leaves from
anywhere, by way of every `finally`; so does Python's own KeyboardInterrupt. The exit code is 128 + the signal's number.

SIGHUP is left alone where it is ignored (`nohup`); the lost terminal gets no more output. Slurm's signal is SIGUSR1
unless its environment says otherwise: `#SBATCH --signal=USR1@90 --requeue` sends it 90 seconds before the job's time
is over, and the job, put into the queue again, resumes. Outside of Slurm SIGUSR1 kills. Either of these two may come
twice from one cause, from an ending shell and the kernel, or from Slurm and torchrun: that is no second signal.

Standard library only until there is a Trainer: a signal may come before torch and Lightning are loaded.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from lit_rl.core import upstream
from lit_rl.core.errors import INTERRUPTED, SIGNALLED, TERMINATED, BackendError
from lit_rl.core.machine import is_rank_zero

if TYPE_CHECKING:
    import lightning as L


class SignalHandlers:
    """Handlers in place of those that were there before. Only the main thread gets signals: elsewhere it does
    nothing."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def install(self, signals: Iterable[int], handler: Callable[[int, Any], object]) -> None:
        """Let a handler get these signals until `restore`."""
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                self._before[number] = signal.signal(number, handler)

    def restore(self, ignored: int | None = None) -> None:
        """Put back the earlier handlers, but ignore one signal from now on."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if number == ignored else handler)
        self._before = {}


def stop_signals(trainer: L.Trainer) -> list[int]:
    """Return the signals that end a run. SIGHUP is none of them where it is ignored, as under `nohup`."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    asked = requeue_signal(trainer)
    return [signal.SIGINT, signal.SIGTERM, *hangup, *([] if asked is None else [asked])]


def may_repeat(number: int, trainer: L.Trainer) -> bool:
    """Tell whether a signal may come twice from one cause."""
    return number in (signal.SIGHUP, requeue_signal(trainer))


# ---------------------------------------------------------------------- exit at once


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
        trainer: The Trainer, whose environment names Slurm's signal.
        then: Called on rank 0 with the number of the signal, behind the block and not in the handler, which may have
            come in the middle of a write.

    Raises:
        SystemExit: with 128 + the number of the signal.
    """
    received: list[int] = []

    def leave(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            detach_from_terminal()
        if received and may_repeat(number, trainer):
            return
        if received:  # again, while it leaves
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(number)
        raise ExitBySignal

    handlers, streams = SignalHandlers(), (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = map(LossyStream, streams)
    try:
        handlers.install(stop_signals(trainer), leave)
        with upstream.without_signal_handlers(trainer):
            yield
    except BaseException:
        if not received:
            raise
    finally:
        handlers.restore()
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
    from lightning.pytorch.utilities.exceptions import SIGTERMException

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
    """End at SIGTERM by way of every `finally`, where there is no Trainer: what is half written or was started goes.

    Raises:
        SystemExit: with 128 + the number of the signal.
    """

    def leave(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(SIGNALLED + number)

    handlers = SignalHandlers()
    try:
        handlers.install([signal.SIGTERM], leave)
        yield
    finally:
        handlers.restore()


# ---------------------------------------------------------------------- a lost terminal


class LossyStream:
    """A stream that drops text it cannot write.

    The terminal may be lost, with SIGHUP on its way; the reader of a pipe may have left; a disk may be full.

    Args:
        stream: `sys.stdout` or `sys.stderr`.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def detach_from_terminal() -> None:
    """Redirect output to /dev/null: writing to a lost terminal would end the process before it has saved."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        mode = os.fstat(descriptor).st_mode  # `isatty` is false for a lost terminal; a pipe's reader is lost with it
        if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


# ---------------------------------------------------------------------- Slurm


def requeue_signal(trainer: L.Trainer) -> int | None:
    """Return the signal that requests a requeue; None outside of Slurm, and with `auto_requeue=False`.

    Slurm's own environment variable decides, as torchrun may have started the processes of a job.
    """
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    environment = upstream.cluster_environment(trainer)
    if isinstance(environment, SLURMEnvironment):
        return environment.requeue_signal if environment.auto_requeue else None
    return signal.SIGUSR1 if "SLURM_JOB_ID" in os.environ else None


def requeue_if_asked(number: int | None, trainer: L.Trainer) -> None:
    """Put this job into the queue again on rank 0, once everything is saved, if this signal requests it. Slurm then
    ends it."""
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

    if trainer.is_global_zero and number is not None and number == requeue_signal(trainer):
        done, message = _requeue_job()
        (rank_zero_info if done else rank_zero_warn)(message)


_process = 0
"""The process that `_requeue_and_exit` is for: one that is forked from it inherits the handler."""
_requeued_by: int | None = None
"""The signal at which `_requeue_and_exit` was called."""


def requeue_before_training() -> None:
    """Install a handler that requeues this job and ends this process with the signal's exit code.

    It serves until the training installs its own; without it the process would be killed, and the job with it. Does
    nothing outside of Slurm, and where the signal has a handler or is ignored.
    """
    global _process
    if "SLURM_JOB_ID" in os.environ and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        _process = os.getpid()
        signal.signal(signal.SIGUSR1, _requeue_and_exit)


def remove_requeue_handler() -> None:
    """Remove that handler, for a run without `GracefulStop` or requeue. Lightning installs its own only without it."""
    if signal.getsignal(signal.SIGUSR1) is _requeue_and_exit:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def forget_requeue() -> None:
    """Forget a requeue of an earlier command of this process."""
    global _requeued_by
    _requeued_by = None


def exit_code_of_requeue() -> int | None:
    """Return the exit code of a process that a signal has requeued before its training, None where none has.

    The exit may have been lost in an import that it interrupted: torch drops what NumPy's raises, and a later import of
    NumPy then fails.
    """
    return None if _requeued_by is None else SIGNALLED + _requeued_by


def _requeue_and_exit(number: int, frame: Any) -> None:
    global _requeued_by
    if os.getpid() != _process:
        signal.signal(number, signal.SIG_DFL)
        return signal.raise_signal(number)
    signal.signal(number, signal.SIG_IGN)
    if is_rank_zero():
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{_requeue_job()[1]}\n".encode())
    _requeued_by = number
    raise SystemExit(SIGNALLED + number)


def _requeue_job() -> tuple[bool, str]:
    """Requeue the job; return whether Slurm did so, and a line about it."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return False, f"The job {job} could not be requeued by Slurm: {error}. Submit it by hand."
    return True, f"The job {job} was requeued by Slurm."


def is_requeued() -> bool:
    """Tell whether Slurm has started this job before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
