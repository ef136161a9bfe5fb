"""Jobs that Slurm takes back before their time is over: they go into the queue again, and go on from where they were.

`#SBATCH --signal=USR1@90 --requeue` sends the signal 90 seconds before the end.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn


def requeue_signal(trainer: Any) -> int | None:
    """The signal that asks for it; None outside of Slurm, and where the user wants none (`auto_requeue=False`)."""
    environment = trainer._accelerator_connector.cluster_environment  # the strategy of one device has none
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal


def requeue() -> None:
    """Put this job into the queue again, by rank 0 once everything is saved. Slurm then ends it."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        rank_zero_warn(f"The job {job} could not be put into Slurm's queue again: {error}. Submit it by hand.")
    else:
        rank_zero_info(f"The job {job} is in Slurm's queue again.")


def is_requeued() -> bool:
    """Whether Slurm has started this job before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
