"""What ends a run: optimizer steps where they are given, else epochs."""

from __future__ import annotations

from typing import Any

EPOCHS = 3
"""Epochs of a run that nothing else ends: as TRL."""


def settle(settings: dict[str, Any]) -> None:
    """Replace `max_epochs: null`: a given `max_steps` means that many steps, over as many epochs as it takes.

    Epochs that are given stay, and then the earlier end counts, as in Lightning.

    Args:
        settings: Of the Trainer; changed in place.
    """
    if settings["max_epochs"] is None:
        settings["max_epochs"] = EPOCHS if settings["max_steps"] == -1 else -1
