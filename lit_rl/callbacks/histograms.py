"""Histograms of rewards and lengths for loggers that draw them (TensorBoard)."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch


class Histograms(L.Callback):
    """Writes `histograms/reward`, `histograms/advantage` and `histograms/length` of this rank's rollouts.

    Args:
        every: Optimizer steps between two of them.
    """

    def __init__(self, every: int = 10) -> None:
        self.every = every

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = pl_module.samples.get("step", [None])[0]
        if batch.slot != 0 or step is None or step % self.every:
            return
        for logger in trainer.loggers:
            add = getattr(getattr(logger, "experiment", None), "add_histogram", None)
            if add is None:
                continue
            for column in ("reward", "advantage", "length"):
                values = torch.tensor(pl_module.samples[column], dtype=torch.float32)
                if len(values := values[values.isfinite()]):
                    add(f"histograms/{column}", values, global_step=step)
