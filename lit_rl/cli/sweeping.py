"""What the jobs of a sweep (`-m`) tell each other: where its table goes, and how each of them ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lit_rl.cli import quiet
from lit_rl.cli.messages import described
from lit_rl.cli.whereabouts import is_main
from lit_rl.errors import INTERRUPTED

_FOLDER = "LIT_RL_SWEEP"
"""Variable with the sweep's folder. Jobs that a launcher of Hydra's starts in other processes inherit it."""


def began(config: DictConfig) -> None:
    """Remember the folder of a sweep that begins.

    Args:
        config: Of the whole sweep, with Hydra's node. A `run_dir` of it is the user's, and the same for all jobs.
    """
    folder = config.get("run_dir") or config.hydra.sweep.dir
    os.environ[_FOLDER] = str(Path(str(folder)).expanduser().absolute())


def noted(run: Callable[[DictConfig], int], config: DictConfig, folder: Path) -> int:
    """Run a training, and add a line about its start and one about its end where it is a job of a sweep.

    Args:
        run: Gives the exit code.
        config: Config of the job.
        folder: Folder of the run, which need not exist.
    """
    sweep = os.environ.get(_FOLDER)
    if not sweep or HydraConfig.get().mode != RunMode.MULTIRUN:
        return run(config)
    with quiet.without_root_handlers():
        from lit_rl.commands import folder_state
        from lit_rl.commands.sweep import note

    job = HydraConfig.get()
    begin = {"job": job.job.num, "overrides": list(job.overrides.task), "folder": str(folder.absolute())}
    begin |= {"earlier_run": True} if folder_state.holds_a_run(folder) else {}
    note(Path(sweep), begin)
    try:
        code = run(config)
    except BaseException as error:
        said = described(error)
        interrupted = {"exit_code": INTERRUPTED} if isinstance(error, KeyboardInterrupt) else {}
        end = {name: said[name] for name in ("exit_code", "error", "message")} | interrupted
        note(Path(sweep), begin | end)
        raise
    note(Path(sweep), begin | {"exit_code": code})
    return code


def ended() -> None:
    """Write the table and the page after the last job, where any job of a training began."""
    if (sweep := os.environ.pop(_FOLDER, None)) is None or not is_main():
        return
    from lit_rl.commands.sweep_report import write_at_the_end

    write_at_the_end(Path(sweep))
