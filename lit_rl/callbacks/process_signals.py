"""Signals from outside that have to be handled before torch is loaded: a lost terminal, and Slurm's requeue.

An output that takes no more while a run writes to it, such as a lost terminal, does not end the run. A job that Slurm
takes back before its time is over goes into the queue again and resumes: `#SBATCH --signal=USR1@90 --requeue` sends
the signal 90 seconds before the end.

Standard library only until there is a Trainer: a signal may come before torch and Lightning are loaded.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from typing import Any

from lit_rl.core import upstream
from lit_rl.core.errors import SIGNALLED
from lit_rl.core.machine import is_rank_zero

# ---------------------------------------------------------------------- lost outputs


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


def requeue_signal(trainer: Any) -> int | None:
    """Return the signal that requests a requeue; None outside of Slurm, and with `auto_requeue=False`.

    Slurm's own environment variable decides, as torchrun may have started the processes of a job.
    """
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    environment = upstream.cluster_environment(trainer)
    if isinstance(environment, SLURMEnvironment):
        return environment.requeue_signal if environment.auto_requeue else None
    return signal.SIGUSR1 if "SLURM_JOB_ID" in os.environ else None


def requeue() -> None:
    """Put this job into the queue again; called by rank 0 once everything is saved. Slurm then ends it."""
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

    done, message = _requeue_job()
    (rank_zero_info if done else rank_zero_warn)(message)


def requeue_before_training() -> None:
    """Install a handler that requeues this job and ends this process with the signal's exit code.

    It serves until the training installs its own; without it the process would be killed, and the job with it. Does
    nothing outside of Slurm, and where the signal has a handler or is ignored.
    """
    if "SLURM_JOB_ID" not in os.environ or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return
    signal.signal(signal.SIGUSR1, _RequeueAndExit(os.getpid()))


def remove_requeue_handler() -> None:
    """Remove that handler, for a run without `GracefulStop` or requeue. Lightning installs its own only without it."""
    if isinstance(signal.getsignal(signal.SIGUSR1), _RequeueAndExit):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


class _RequeueAndExit:
    """The handler that requeues the job and exits. It does nothing in a forked process."""

    def __init__(self, process: int) -> None:
        self.process = process

    def __call__(self, number: int, frame: Any) -> None:
        if os.getpid() != self.process:
            signal.signal(number, signal.SIG_DFL)
            return signal.raise_signal(number)
        signal.signal(number, signal.SIG_IGN)
        if is_rank_zero():
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{_requeue_job()[1]}\n".encode())
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
