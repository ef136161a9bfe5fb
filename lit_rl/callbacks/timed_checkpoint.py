"""Checkpoints at intervals that follow from their cost.

A checkpoint holds weights, optimizer and the half-used rollout, and is flushed to the disk: milliseconds for a tiny
policy, a minute for a large one. No fixed number of optimizer steps suits both. So the next one is due when the
duration of the last one is at most a given share of the time since.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rl.algorithms.optim.strategies import ZeROStrategy
from lit_rl.core import upstream
from lit_rl.core.declared_settings import checked
from lit_rl.core.durable_files import check_free_space
from lit_rl.core.errors import StorageError
from lit_rl.ops.ranges import AtLeastOne, NotNegative, Share


@checked("callbacks.checkpoint")
class TimedCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` of Lightning's that is due by the clock instead of by a number of steps.

    It saves at the end of an optimizer step, never between two micro-batches. Rank 0's clock decides for all.

    Args:
        max_share: The largest share of a run's time that writing may take, in (0, 1].
        every_seconds: Least seconds between two checkpoints, at least 0.
        every_n_train_steps: Optimizer steps between two checkpoints, in place of the clock. None: by the clock, unless
            another of Lightning's intervals is set.
        settings: Further arguments of `ModelCheckpoint`.
    """

    def __init__(
        self,
        *,
        max_share: Share = 0.05,
        every_seconds: NotNegative = 10.0,
        every_n_train_steps: AtLeastOne | None = None,
        **settings: Any,
    ) -> None:
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
        """Check the disk space before the first step.

        It has to hold a checkpoint with the optimizer's state, the one before it, which stays until the new one is
        whole, and the export.
        """
        if not self.dirpath:
            return
        weights = list(pl_module.parameters())
        if isinstance(trainer.strategy, ZeROStrategy):  # a rank holds a part of each
            one = trainer.strategy.checkpoint_bytes()
        else:
            trained = (weight for weight in weights if weight.requires_grad)
            one = _bytes(trained) + sum(map(_state_size, trainer.optimizers))
        has_checkpoint = any(Path(self.dirpath).glob("*.ckpt"))
        try:
            check_free_space(self.dirpath, one * (1 if has_checkpoint else 2) + _bytes(weights))
        except OSError as error:
            raise StorageError(
                f"There is no room for a checkpoint, the one before it and the export: {error}. Take a run_dir on "
                "another disk, or make room."
            ) from error

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped, self._steps = trainer.global_step > self._steps, trainer.global_step
        # Lightning forgets its last save, and would save again after the first micro-batch of a resumed run.
        # Rank 0's clock decides for all.
        if not stepped or (self.by_clock and not trainer.strategy.broadcast(time.monotonic() >= self._due)):
            return
        began = time.monotonic()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        ended = time.monotonic()
        self._due = ended + max(self.every_seconds, (ended - began) * (1 / self.max_share - 1))

    def save_step(self, trainer: L.Trainer, path: str | Path) -> None:
        """Save the current step, due or not; then remove checkpoints beyond `save_top_k`, as after any other save.

        Where `monitor` is not the step, this one is kept beside the best ones.
        """
        key, before = os.path.realpath(path), dict(self.best_k_models)
        if self.monitor == "step" and self.mode == "max" and self.save_top_k > 0:
            # It counts among the newest checkpoints: a resume reads that from the file itself.
            steps = {**self.best_k_models, key: torch.tensor(float(trainer.global_step))}
            newest = sorted(steps, key=lambda name: float(steps[name]), reverse=True)[: self.save_top_k]
            self.best_k_models = {name: steps[name] for name in newest}
            self.best_model_path, self.best_model_score = newest[0], steps[newest[0]]
            if len(newest) == self.save_top_k:
                self.kth_best_model_path, self.kth_value = newest[-1], steps[newest[-1]]
        trainer.save_checkpoint(path, weights_only=False)
        self._last_global_step_saved = trainer.global_step
        for name in before.keys() - self.best_k_models.keys():
            if self._should_remove_checkpoint(trainer, name, key):
                self._remove_checkpoint(trainer, name)

    def _should_remove_checkpoint(self, trainer: L.Trainer, previous: str, current: str) -> bool:
        """Tell whether to remove a checkpoint: any in this folder, also the resumed one, which Lightning keeps."""
        if not self.dirpath or previous == current:
            return False
        return os.path.realpath(Path(previous).parent) == os.path.realpath(self.dirpath)


def save_step(trainer: L.Trainer, path: str | Path) -> None:
    """Save the current step by the Trainer's checkpoint callback, which then removes superseded ones."""
    callback = trainer.checkpoint_callback
    if isinstance(callback, TimedCheckpoint):
        callback.save_step(trainer, path)
    else:
        trainer.save_checkpoint(path, weights_only=False)


def _bytes(weights: Iterable[torch.Tensor]) -> int:
    return sum(getattr(weight, "ds_numel", weight.numel()) * weight.element_size() for weight in weights)


def _state_size(optimizer: torch.optim.Optimizer) -> int:
    """Return the least bytes of an optimizer's state; before its first step those of its moments to come."""
    narrow = any(word in type(optimizer).__name__.lower() for word in ("8bit", "split"))
    moments = sum(
        len(group.get("betas", ())) * (1 if narrow else 4) * weight.numel()
        for group in optimizer.param_groups
        for weight in group["params"]
    )
    held = upstream.leaves(dict(getattr(optimizer, "state", {})))
    return max(moments, _bytes(each for each in held if isinstance(each, torch.Tensor)))
