"""What ends a run: optimizer steps where they are given, else epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EPOCHS = 3
"""Epochs of a run that nothing else ends: as TRL."""


def epochs(settings: Mapping[str, Any]) -> int:
    """`max_epochs`, or what stands for it where it is null: a given `max_steps` means that many steps.

    Epochs that are given stay, and then the earlier end counts, as in Lightning.

    Args:
        settings: Of the Trainer.

    Returns:
        -1 where steps alone end the run.
    """
    if settings["max_epochs"] is not None:
        return settings["max_epochs"]
    return EPOCHS if settings["max_steps"] == -1 else -1
