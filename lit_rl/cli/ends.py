"""What ends a run: optimizer steps where they are given, else epochs. And whether it has ended."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_rl.commands import folder_state

EPOCHS = 3
"""Epochs of a run without any other end, as in TRL."""


def epochs(settings: Mapping[str, Any]) -> int:
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
    return longer or _bound(epochs(settings)) > _bound(epochs(before))


def is_over(settings: Mapping[str, Any], folder: Path) -> bool:
    """Tell whether the run of a folder has finished, and these settings of the Trainer end it no later."""
    if not folder_state.is_finished(folder):
        return False
    steps = int(folder_state.read_summary(folder).get("steps", 0))
    return not is_later(settings, folder_state.read_config(folder).get("trainer"), steps)


def say_is_over(folder: Path) -> None:
    """Print that a run is over."""
    sys.stdout.write(f"{folder} holds a finished run: nothing to do.\n")


def _bound(number: int) -> float:
    return math.inf if number == -1 else number
