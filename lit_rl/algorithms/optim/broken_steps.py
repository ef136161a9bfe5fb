"""Optimizer steps whose gradient is not finite: left out, counted, and kept for a look."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.errors import NumericError

if TYPE_CHECKING:
    from lit_rl.algorithms.loop.module import PolicyModule

LIMIT = 5
"""Broken steps in a row after which a run ends."""


class BrokenSteps:
    """Keeps NaN and infinity out of the weights and out of the optimizer's moments.

    The norm of a gradient is the same on every rank, so all leave out the same steps. Under a gradient scaler
    (16-mixed) infinity means that the scale was too large: the scaler leaves such steps out itself.
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self.last = False
        """Whether the step at hand was left out."""

    def check(self, module: PolicyModule, optimizer: Any) -> None:
        """After the norm was taken: without gradients an optimizer moves neither a weight nor a moment.

        Raises:
            NumericError: `LIMIT` steps in a row were broken.
        """
        scaled = getattr(module.trainer.precision_plugin, "scaler", None) is not None
        norm = float(module.grad_norm)
        self.last = not math.isfinite(norm) and not scaled
        if not self.last:
            self.in_a_row = 0
            return
        optimizer.zero_grad()
        self.in_a_row += 1
        kept = _keep(module, norm)
        said = f"Optimizer step {module.step + 1} has a gradient of norm {norm} and is left out.{kept}"
        if self.in_a_row < LIMIT:
            rank_zero_warn(said)
            return
        raise NumericError(
            f"{said} It is the {LIMIT}th in a row; the weights are as they were before them, and so is the last "
            "checkpoint. Lower optimizer.lr, or look for a loss or a reward that is infinite; with trainer.precision="
            "bf16-true or 16-true take a -mixed precision."
        )


def _keep(module: PolicyModule, norm: float) -> str:
    """Write what the step would have learned from, tensors and numbers only; the newest one stays."""
    if module.trainer.fast_dev_run:  # pyright: ignore
        return ""
    name = "bad_batch.pt" if module.global_rank == 0 else f"bad_batch_rank{module.global_rank}.pt"
    path = Path(module.trainer.default_root_dir) / name
    try:
        torch.save({"step": module.step + 1, "grad_norm": norm, **module.step_batch()}, path)
    except (OSError, RuntimeError) as error:  # a full disk must not end what the skipped step saved
        return f" Its batch could not be written to {path}: {error}."
    return f" Its batch is in {path} (torch.load)."
