"""Slurm's requeue: jobs whose time is almost over go into the queue again, and resume.

`#SBATCH --signal=USR1@90 --requeue` sends the signal 90 seconds before the end.

Standard library only until there is a Trainer: the signal may come before torch and Lightning are loaded.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from lit_rl.errors import SIGNALLED


def requeue_signal(trainer: Any) -> int | None:
    """Return the signal that requests a requeue; None outside of Slurm, and with `auto_requeue=False`.

    Slurm's own environment variable decides, as torchrun may have started the processes of a job.
    """
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    environment = trainer._accelerator_connector.cluster_environment  # the strategy of one device has none
    if isinstance(environment, SLURMEnvironment):
        return environment.requeue_signal if environment.auto_requeue else None
    return signal.SIGUSR1 if "SLURM_JOB_ID" in os.environ else None


def requeue() -> None:
    """Put this job into the queue again; called by rank 0 once everything is saved. Slurm then ends it."""
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

    done, said = _asked()
    (rank_zero_info if done else rank_zero_warn)(said)


def requeue_until_it_trains() -> None:
    """Install a handler that requeues this job and ends this process with the signal's exit code.

    It serves until the training installs its own; without it the process would be killed, and the job with it. Does
    nothing outside of Slurm, and where the signal has a handler or is ignored.
    """
    if "SLURM_JOB_ID" not in os.environ or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return
    signal.signal(signal.SIGUSR1, _Leave(os.getpid()))


def leave_it_to_others() -> None:
    """Remove that handler, for a run without `GracefulStop` or requeue. Lightning installs its own only without it."""
    if isinstance(signal.getsignal(signal.SIGUSR1), _Leave):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


class _Leave:
    """The handler that requeues the job and exits. It does nothing in a forked process."""

    def __init__(self, process: int) -> None:
        self.process = process

    def __call__(self, number: int, frame: Any) -> None:
        if os.getpid() != self.process:
            signal.signal(number, signal.SIG_DFL)
            return signal.raise_signal(number)
        signal.signal(number, signal.SIG_IGN)
        if _is_first():
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{_asked()[1]}\n".encode())
        raise SystemExit(SIGNALLED + number)


def _is_first() -> bool:
    """Tell whether this is rank 0. torchrun numbers its processes apart from the Slurm task that it runs in."""
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return all(os.environ.get(name, "0") == "0" for name in ("SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"))


def _asked() -> tuple[bool, str]:
    """Requeue the job; return whether Slurm did so, and a line about it."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return False, f"The job {job} could not be put into Slurm's queue again: {error}. Submit it by hand."
    return True, f"The job {job} is in Slurm's queue again."


def is_requeued() -> bool:
    """Tell whether Slurm has started this job before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
