"""Facts about a run that a config gives before torch loads: whether there are other processes, the folder, the length
of the run, and whether it has finished."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lit_rl.core.errors import StorageError
from lit_rl.core.machine import RANK_VARIABLES
from lit_rl.reports.run_files import RunFiles

# ---------------------------------------------------------------------- other processes and jobs


def is_launched() -> bool:
    """Tell whether a launcher, or rank 0 of the run, has started this process: there may be others."""
    return TOLD_FOLDER in os.environ or any(name in os.environ for name in RANK_VARIABLES)


def is_sweep() -> bool:
    """Tell whether this is a job of a sweep."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


# ---------------------------------------------------------------------- tasks and folders


TOLD_FOLDER, TOLD_CHECKPOINT = "LIT_RL_RUN_DIR", "LIT_RL_CKPT_PATH"
"""Variables by which rank 0 sends the folder and the checkpoint of the run to the processes that it starts."""

COMPUTE_NOTHING = ("reward_test", "env_check")
"""Tasks that never use the policy."""

EVALUATE = ("eval", "validate", "test", "predict", "best_of_n")
"""Tasks that evaluate a policy."""


def is_over_a_run(task: str, run_dir: str | None) -> bool:
    """Tell whether this command evaluates, and its `run_dir` is the folder of a run, readable or not."""
    if task not in EVALUATE or not run_dir:
        return False
    try:
        folder = Path(str(run_dir)).expanduser()
        run = RunFiles(folder)
        return run.config_file.is_file() and (not run.config or run.holds_a_run)
    except (OSError, RuntimeError):  # no valid folder name; opening it reports that
        return False


def writes_nothing(config: DictConfig) -> bool:
    """Tell whether the command leaves no folder behind."""
    return bool(config.trainer.get("fast_dev_run")) or config.task in (*COMPUTE_NOTHING, "plan")


def folder_of(config: DictConfig) -> Path:
    """Return the run's folder: the user's, or one named by time, algorithm and model.

    Raises:
        StorageError: no folder can have that name.
    """
    hydra_config = HydraConfig.get()
    if is_sweep():
        base = Path(config.run_dir) if config.run_dir else Path(hydra_config.sweep.dir)
        path = base / str(hydra_config.sweep.subdir)
    elif config.run_dir:
        path = Path(str(config.run_dir)).expanduser()
    else:
        stamp = datetime.now().strftime("%Y-%m-%d_%H%M%S")
        what = hydra_config.runtime.choices.get("algo") if config.task == "fit" else config.task
        path = Path("runs") / f"{stamp}_{what}_{_label(config)}"
    _check_names(path)
    return path


def _check_names(path: Path) -> None:
    """Refuse names that no folder can have, before one above it is made."""
    try:
        for each in _names(path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # of a file it is said where it is opened
                each.lstat()
    except (OSError, ValueError) as error:  # too long, a NUL in it
        name = repr(str(path)) if len(str(path)) < 300 else f"{str(path)[:200]!r}..."
        raise StorageError(f"run_dir={name} cannot be a folder's name: {_reason(error)}.") from error


def _names(path: Path) -> Iterator[Path]:
    """Yield the path; and each name in it without a folder yet, below one that is there: the system cannot look inside
    a missing folder."""
    yield path
    there = next((parent for parent in path.parents if parent.is_dir()), path)
    yield from (there / name for name in path.parts[len(there.parts) :])


def _reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)


def _label(config: DictConfig) -> str:
    from lit_rl.models import LanguageModel

    name = OmegaConf.select(config, "model.name", throw_on_missing=False)
    return LanguageModel(name).label if name else "model"


def training_command(words: Sequence[str]) -> str:
    """Return the line that starts a training with these overrides, as this one was started."""
    entry = ["python", sys.argv[0]] if sys.argv[0].endswith(".py") else ["lit-rl", "train"]
    return shlex.join([*entry, *words])


# ---------------------------------------------------------------------- the length of a run


EPOCHS = 3
"""Epochs of a run without any other end, as in TRL."""


def max_epochs(settings: Mapping[str, Any]) -> int:
    """Return `max_epochs`, or its default where it is null: a given `max_steps` ends the run instead.

    Epochs that are given stay, and then the earlier end counts, as in Lightning.

    Args:
        settings: Settings of the Trainer.

    Returns:
        -1 where steps alone end the run.
    """
    if settings["max_epochs"] is not None:
        return settings["max_epochs"]
    return EPOCHS if settings["max_steps"] == -1 else -1


def is_later(settings: Mapping[str, Any], before: Mapping[str, Any] | None, steps: int) -> bool:
    """Tell whether a run that has finished would continue with these settings.

    Args:
        settings: Settings of the Trainer.
        before: Those that it finished with; None where nobody knows.
        steps: Optimizer steps that it has made.
    """
    if not before or not steps < _bound(settings["max_steps"]):
        return False
    longer = _bound(settings["max_steps"]) > _bound(before["max_steps"])
    return longer or _bound(max_epochs(settings)) > _bound(max_epochs(before))


def is_run_over(settings: Mapping[str, Any], folder: Path) -> bool:
    """Tell whether the run of a folder has finished, and these settings of the Trainer end it no later."""
    run = RunFiles(folder)
    if not run.finished:
        return False
    return not is_later(settings, run.config.get("trainer"), int(run.summary.get("steps", 0)))


def print_run_over(folder: Path) -> None:
    """Print that a run is over."""
    sys.stdout.write(f"{folder} holds a finished run: nothing to do.\n")


def _bound(number: int) -> float:
    return math.inf if number == -1 else number
