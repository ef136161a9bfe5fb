"""Ctrl-C, SIGTERM, a terminal that is gone, Slurm's word: finish the optimizer step, save, stop. A second signal ends
the process at once.

A generator or an environment that fails ends the run too: what was learned until then is saved.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import _TunerExitException

from lit_rl.callbacks.checkpoint_files import is_whole
from lit_rl.callbacks.slurm import requeue, requeue_signal
from lit_rl.callbacks.terminal import let_go_of_the_terminal
from lit_rl.callbacks.timed_checkpoint import save_step
from lit_rl.errors import GenerationError


class GracefulStop(L.Callback):
    """Replaces Lightning's handler, which broadcasts inside the signal handler: with one rank generating and another
    waiting, that hangs. Here the handler sets a flag, and all ranks agree on it between two optimizer steps.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        """The signal that came; None while none has."""
        self._before: dict[int, Any] = {}
        self._place: dict[str, Any] | None = None
        self._failed = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._place, self._failed = None, False
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in signals_of(trainer):
            self._before[signum] = signal.signal(signum, lambda number, frame: self._on_signal(trainer, number))

    def _on_signal(self, trainer: L.Trainer, number: int) -> None:
        if number == self.signum == signal.SIGHUP:
            return  # a shell that ends and the kernel both send one
        if self.signum is not None:
            self._restore()
            signal.raise_signal(number)  # for whoever was there before us
            return
        self.signum = number
        if number == signal.SIGHUP:
            let_go_of_the_terminal()
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
            self._place = None
            return
        self._take_down(trainer)
        # Where a validation is due it is begun, and ends before its first batch: the next start makes it then.
        if self._is_to_end(trainer) and not _validates_next(trainer):
            checkpoint = trainer.checkpoint_callback
            folder = getattr(checkpoint, "dirpath", None)
            if folder is not None:
                save_step(trainer, f"{folder}/step_{trainer.global_step:08d}.ckpt")
            trainer.should_stop = True
            trainer.fit_loop.epoch_loop._skip_next_val = True  # Lightning validates where `should_stop` is set
            self._requeue(trainer)

    def _is_to_end(self, trainer: L.Trainer) -> bool:
        """Whether a signal ends the run, the same on every rank: `signum` is that signal then."""
        mine = torch.tensor(float(self.signum or 0), device=trainer.strategy.root_device)
        self.signum = int(trainer.strategy.reduce(mine, reduce_op="max")) or None  # pyright: ignore
        return self.signum is not None

    def _requeue(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and self.signum == requeue_signal(trainer):
            requeue()

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        # Every rank has as many batches, so all of them ask. Half a validation is none: the next start makes it anew.
        if self._place is not None and self._is_to_end(trainer):
            self._save_place(trainer, in_validation=True, anew=True)
            self._requeue(trainer)
            trainer.training = True
            call._call_callback_hooks(trainer, "on_train_end")
            call._call_lightning_module_hook(trainer, "on_train_end")
            raise _TunerExitException  # the one way out of a loop that Lightning takes for a good end

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._place is None:
            return
        self._take_down(trainer)
        if self._is_to_end(trainer):
            self._save_place(trainer, in_validation=False)
            trainer.should_stop = True
            self._requeue(trainer)

    def _take_down(self, trainer: L.Trainer) -> None:
        """Where the loops and the data stand: a rollout that cannot be drawn begins by moving them on."""
        self._place = {"epoch": trainer.current_epoch, "fit_loop": trainer.fit_loop.state_dict()}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._place = None
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore()
        if isinstance(exception, GenerationError):
            alone = trainer.world_size > 1 and not exception.on_every_rank
            path = self._save_place(trainer, in_validation=trainer.validating, alone=alone)
            if path is not None:
                rank_zero_info(
                    f"The rollout failed. Everything up to optimizer step {trainer.global_step} is saved: {path}"
                )

    def _save_place(
        self, trainer: L.Trainer, *, in_validation: bool, alone: bool = False, anew: bool = False
    ) -> Path | None:
        """Save the run as it was after its last optimizer step, or validation; nothing that was learned is lost.

        Args:
            in_validation: One has begun and not ended.
            alone: The other ranks do not come here.
            anew: In place of a checkpoint of this step, which may not know of the validation.

        Returns:
            The checkpoint; None where none can be saved.
        """
        if self._place is not None and in_validation:
            self._take_down(trainer)
            self._place = {**self._place, "fit_loop": _before_validation(self._place["fit_loop"])}
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if self._place is None or folder is None or alone:  # saving takes every rank
            return None
        path = Path(folder) / f"step_{trainer.global_step:08d}.ckpt"
        if anew or not trainer.strategy.broadcast(is_whole(path)):
            self._failed = True
            save_step(trainer, path)
        return path

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._failed and self._place is not None:
            checkpoint["epoch"] = self._place["epoch"]
            checkpoint["loops"]["fit_loop"] = self._place["fit_loop"]

    def _restore(self) -> None:
        for signum, handler in self._before.items():
            # A terminal that is gone may say so twice, and the run is about to end.
            said = signum == self.signum == signal.SIGHUP
            signal.signal(signum, signal.SIG_IGN if said else handler)
        self._before = {}


def signals_of(trainer: L.Trainer) -> list[int]:
    """Those that end a run, which is saved. `nohup` has the end of a terminal ignored: then it is none."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    asked = requeue_signal(trainer)
    return [signal.SIGINT, signal.SIGTERM, *hangup, *([] if asked is None else [asked])]


def _validates_next(trainer: L.Trainer) -> bool:
    """Whether Lightning validates after this optimizer step, whatever has come."""
    epoch_loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    batches = sum(epoch_loop.val_loop.max_batches)
    return fetcher is not None and batches > 0 and epoch_loop._should_check_val_fx(fetcher)


def _before_validation(fit_loop: dict[str, Any]) -> dict[str, Any]:
    """Loops that stopped in a validation, as if in its first batch: half of its numbers would be lost otherwise."""
    key = "epoch_loop.val_loop.batch_progress"
    done = fit_loop[key]["current"]["completed"]
    counts = {part: _before_a_batch(fit_loop[key][part]["completed"] - done) for part in ("total", "current")}
    return {**fit_loop, key: {**fit_loop[key], **counts, "is_last_batch": False}}


def _before_a_batch(done: int) -> dict[str, int]:
    """Lightning's counts where so many batches are done and the next one has begun."""
    return {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
