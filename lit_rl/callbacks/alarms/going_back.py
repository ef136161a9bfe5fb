"""Roll-backs in the middle of a run, to the last checkpoint from before a problem.

The practice is PaLM's (2204.02311, section 5.1): weights and optimizer of an earlier checkpoint, and later data. The
same data would lead to the same place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.errors import ConfigError, StorageError

FOLDER = "before_alarm"
"""The folder of kept checkpoints, in the folder of checkpoints."""


def can_go_back(key: str, trainer: L.Trainer, module: Any) -> None:
    """Refuse a run that could not be rolled back.

    Raises:
        ConfigError: its strategy spreads weights, nothing is saved, or completions are drawn ahead.
    """
    what = f"callbacks.{key}.then=roll_back"
    instead = f"Set callbacks.{key}.then=stop, and go on by hand from the checkpoint that you want."
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        name = type(trainer.strategy).__name__
        raise ConfigError(f"{what} is there for strategy=auto and ddp, and this run has {name}. {instead}")
    if getattr(getattr(module, "generator", None), "lag", 0):
        raise ConfigError(
            f"{what} cannot throw away completions that are drawn ahead: set generator.lag=0. Or: {instead}"
        )
    if trainer.checkpoint_callback is None and not trainer.fast_dev_run:  # pyright: ignore
        raise ConfigError(f"{what} needs checkpoints, and this run saves none: leave callbacks=none out. {instead}")


class GoodCheckpoint:
    """A hard link to the newest checkpoint that was saved without a problem; it stays when that one is replaced.

    Args:
        key: Name of the alarm and of the file.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._newest = ""

    def keep(self, trainer: L.Trainer, *, quiet: bool) -> None:
        """Link the checkpoint that was saved since the last call, if there was no problem (`quiet`)."""
        newest = str(getattr(trainer.checkpoint_callback, "_last_checkpoint_saved", ""))
        if newest in ("", self._newest):
            return
        self._newest = newest
        if not quiet or not trainer.is_global_zero or not Path(newest).is_file():
            return
        target = Path(newest).parent / FOLDER / f"{self.key}.ckpt"
        try:
            target.parent.mkdir(exist_ok=True)
            partial = target.with_suffix(".new")
            partial.unlink(missing_ok=True)
            os.link(newest, partial)
            os.replace(partial, target)
        except OSError as error:
            rank_zero_warn(
                f"The checkpoint that callbacks.{self.key} would go back to could not be kept ({error}): it goes back "
                "to an earlier one, or stops."
            )

    def go_back(self, trainer: L.Trainer, module: Any) -> int | None:
        """Restore the kept checkpoint; return its optimizer step, or None where there is no checkpoint.

        A collective, called between two rollouts.
        """
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        path = Path(folder or ".") / FOLDER / f"{self.key}.ckpt"
        if not trainer.strategy.broadcast(path.is_file()):
            return None
        try:
            checkpoint = trainer.strategy.load_checkpoint(path, weights_only=True)
        except StorageError as error:
            rank_zero_warn(str(error))
            return None
        if checkpoint["global_step"] >= trainer.global_step:
            return None  # from an earlier attempt at this run, which was resumed from an older checkpoint
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        module.go_back_to(checkpoint)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        for optimizer, before in zip(trainer.optimizers, rates):
            for group, rate in zip(optimizer.param_groups, before):
                group["lr"] = rate  # the schedule goes on
        return int(checkpoint["global_step"])
