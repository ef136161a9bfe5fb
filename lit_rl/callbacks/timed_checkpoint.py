"""Checkpoints as often as they are cheap.

A checkpoint holds weights, optimizer and the half-used rollout, and is flushed to the disk: milliseconds for a tiny
policy, a minute for a large one. A number of optimizer steps between two of them suits only one of both. So the next
one is due when what the last one took is at most a given share of the time since.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils._pytree import tree_leaves

from lit_rl.durable import check_room
from lit_rl.errors import StorageError, in_range


class TimedCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, due by the clock instead of by a number of steps.

    It saves at the end of an optimizer step, never between two micro-batches. Rank 0's clock decides for all.

    Args:
        max_share: The largest share of a run's time that writing may take, in (0, 1].
        every_seconds: Not more often than this, in seconds, at least 0.
        every_n_train_steps: Save every so many optimizer steps instead, whatever it takes. None: by the clock, unless
            another of Lightning's intervals is set.
        settings: What `ModelCheckpoint` takes.
    """

    def __init__(
        self,
        *,
        max_share: float = 0.05,
        every_seconds: float = 10.0,
        every_n_train_steps: int | None = None,
        **settings: Any,
    ) -> None:
        in_range("callbacks.checkpoint.max_share", max_share, low=0, high=1, open_low=True)
        in_range("callbacks.checkpoint.every_seconds", every_seconds, low=0)
        if every_n_train_steps is not None:
            in_range("callbacks.checkpoint.every_n_train_steps", every_n_train_steps, low=1)
        intervals = every_n_train_steps, settings.get("every_n_epochs"), settings.get("train_time_interval")
        self.by_clock = intervals == (None, None, None)
        super().__init__(every_n_train_steps=1 if self.by_clock else every_n_train_steps, **settings)
        self.max_share, self.every_seconds = max_share, every_seconds
        self._due, self._steps = 0.0, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero and self.save_top_k:  # the only one that writes
            self._check_room(trainer, pl_module)
        self._due, self._steps = time.monotonic() + self.every_seconds, trainer.global_step

    def _check_room(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before the first step: a checkpoint with the optimizer's state, the one before it, which stays until the new
        one is whole, and the export."""
        if not self.dirpath:
            return
        weights = list(pl_module.parameters())
        one = _bytes(weight for weight in weights if weight.requires_grad) + sum(map(_state_size, trainer.optimizers))
        there = any(Path(self.dirpath).glob("*.ckpt"))
        try:
            check_room(self.dirpath, one * (1 if there else 2) + _bytes(weights))
        except OSError as error:
            raise StorageError(
                f"There is no room for a checkpoint, the one before it and the export: {error}. Take a run_dir on "
                "another disk, or make room."
            ) from error

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped, self._steps = trainer.global_step > self._steps, trainer.global_step
        # Lightning, which forgets what it saved last, would save again after the first micro-batch of a resumed run.
        if not stepped or (self.by_clock and not self._is_due(trainer)):
            return
        began = time.monotonic()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        ended = time.monotonic()
        self._due = ended + max(self.every_seconds, (ended - began) * (1 / self.max_share - 1))

    def _is_due(self, trainer: L.Trainer) -> bool:
        """Whether rank 0's clock says that it is time."""
        return bool(trainer.strategy.broadcast(time.monotonic() >= self._due))


def _bytes(weights: Iterable[torch.Tensor]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights)


def _state_size(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that an optimizer keeps, at least; before its first step what its moments will take."""
    narrow = any(word in type(optimizer).__name__.lower() for word in ("8bit", "split"))
    moments = sum(
        len(group.get("betas", ())) * (1 if narrow else 4) * weight.numel()
        for group in optimizer.param_groups
        for weight in group["params"]
    )
    held = tree_leaves(dict(getattr(optimizer, "state", {})))
    return max(moments, _bytes(each for each in held if isinstance(each, torch.Tensor)))
