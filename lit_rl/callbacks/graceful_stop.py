"""Ctrl-C and SIGTERM: finish the optimizer step, save, stop. A second signal ends the process at once."""

from __future__ import annotations

import signal
import threading
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info


class GracefulStop(L.Callback):
    """Replaces Lightning's handler, which broadcasts inside the signal handler: with one rank generating and another
    waiting, that hangs. Here the handler sets a flag, and all ranks agree on it between two optimizer steps.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        """The signal that came; None while none has."""
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        environment = getattr(trainer.strategy, "cluster_environment", None)
        requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        if threading.current_thread() is not threading.main_thread() or requeues:
            return
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, lambda number, frame: self._on_signal(trainer, number))

    def _on_signal(self, trainer: L.Trainer, number: int) -> None:
        if self.signum is not None:
            self._restore()
            signal.raise_signal(number)  # for whoever was there before us
            return
        self.signum = number
        launcher = trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(number)  # to the processes that this one started; they set their own flag
        rank_zero_info(
            f"{signal.Signals(number).name}: finishing the optimizer step and saving. Once more to stop at once."
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Only where every rank stands at the end of an optimizer step: no half-accumulated gradient has to be saved.
        if trainer.fit_loop._should_accumulate():
            return
        if trainer.strategy.reduce_boolean_decision(self.signum is not None, all=False):
            checkpoint = trainer.checkpoint_callback
            folder = getattr(checkpoint, "dirpath", None)
            if folder is not None:
                trainer.save_checkpoint(f"{folder}/step_{trainer.global_step:08d}.ckpt", weights_only=False)
            trainer.should_stop = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}
