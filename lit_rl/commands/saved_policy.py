"""The policy of a checkpoint, for commands that look at it and train nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_rl.callbacks.checkpoint_files import fault_of_contents, unusable, verify_once


@dataclass(frozen=True)
class SavedPolicy:
    """The policy in a checkpoint."""

    weights: dict[str, Tensor]
    """Tensors by their names in the module."""
    step: int
    """Optimizer steps that it has taken."""
    beside: dict[str, Any]
    """The settings that the checkpoint notes of its run, and the keys that were asked for, where they are there."""


def saved_policy(checkpoint: Path, beside: Sequence[str] = ()) -> SavedPolicy:
    """Read a checkpoint.

    Args:
        checkpoint: The file.
        beside: Keys of the checkpoint that are wanted too, such as `reference`.

    Raises:
        StorageError: it is no checkpoint of a run, or is damaged.
    """
    verify_once(checkpoint)
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        weights = {name: tensor for name, tensor in saved["state_dict"].items() if name.startswith("policy.")}
        return SavedPolicy(
            weights, int(saved["global_step"]), {key: saved[key] for key in ("run", *beside) if key in saved}
        )
    except Exception as error:  # an unpickler fails on a file of another kind in every way there is
        raise unusable(checkpoint, fault_of_contents(error)) from error
