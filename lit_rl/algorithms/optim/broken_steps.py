"""Optimizer steps whose gradient is not finite: skipped, counted, and saved for inspection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.core.errors import NumericError

LIMIT = 5
"""Broken steps in a row after which a run ends."""


class BrokenSteps:
    """A guard that keeps NaN and infinity out of the weights and the optimizer's moments.

    The norm of a gradient is the same on every rank, so all skip the same steps. Under a gradient scaler (16-mixed)
    infinity means that the scale was too large: the scaler skips such steps itself.
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self.last = False
        """True where the current step is skipped."""

    def should_skip(self, norm: float, *, scaled: bool) -> bool:
        """Count the step, and tell whether to skip it.

        Args:
            norm: Norm of its gradient, over all ranks.
            scaled: Whether a gradient scaler handles it.
        """
        self.last = not math.isfinite(norm) and not scaled
        self.in_a_row = self.in_a_row + 1 if self.last else 0
        return self.last

    def report(self, step: int, norm: float, saved_batch: str) -> None:
        """Warn of a skipped step; end the run after too many in a row.

        Args:
            step: Number of the step.
            norm: Norm of its gradient.
            saved_batch: A sentence with the place of its batch, or empty.

        Raises:
            NumericError: `LIMIT` steps in a row were broken.
        """
        message = f"Optimizer step {step} is skipped, as the norm of its gradient is {norm}.{saved_batch}"
        if self.in_a_row < LIMIT:
            rank_zero_warn(message)
            return
        raise NumericError(
            f"{message} It is the {LIMIT}th in a row, so the run ends. The weights and the last checkpoint are as "
            "before these steps. Lower optimizer.lr, or look for a loss or a reward that is infinite."
        )


def save_bad_batch(folder: Path, rank: int, batch: Mapping[str, Any]) -> str:
    """Write the batch of a broken step, tensors and numbers only; the newest one stays.

    Returns:
        A sentence with its place.
    """
    path = folder / ("bad_batch.pt" if rank == 0 else f"bad_batch_rank{rank}.pt")
    try:
        torch.save(dict(batch), path)
    except (OSError, RuntimeError) as error:  # a full disk must not end a run that the skipped step saved
        return f" Its batch could not be written to {path}: {error}."
    return f" Its batch is in {path} (torch.load)."
