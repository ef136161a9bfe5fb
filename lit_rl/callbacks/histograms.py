"""Histograms of rewards and lengths for loggers that draw them (TensorBoard)."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from lit_rl.callbacks.due import Due


class Histograms(L.Callback):
    """Histograms `histograms/reward`, `histograms/advantage` and `histograms/length` of this rank's rollouts.

    Args:
        every: Optimizer steps between two of them: they are written at step 0, and for the first rollout that begins
            at or after each multiple of it.

    Raises:
        ConfigError: `every` is below 1.
    """

    def __init__(self, every: int = 10) -> None:
        self._due = Due("callbacks.histograms.every", every)

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._due.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._due.last = state_dict["last"]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = pl_module.samples.get("step", [None])[0]
        if batch.slot != 0 or step is None or not self._due.at(step):
            return
        for logger in trainer.loggers:
            add = getattr(getattr(logger, "experiment", None), "add_histogram", None)
            if add is None:
                continue
            for column in ("reward", "advantage", "length"):
                values = torch.tensor(pl_module.samples[column], dtype=torch.float32)
                if len(values := values[values.isfinite()]):
                    add(f"histograms/{column}", values, global_step=step)
