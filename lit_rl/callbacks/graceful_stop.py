"""Graceful stop: on Ctrl-C, SIGTERM, SIGHUP or Slurm's signal, save and stop within seconds.

A second signal ends the process at once. An optimizer step that has begun is finished. A rollout, its rewards and a
validation are abandoned: nothing was learned from them, and the resumed run makes them anew (`lit_rl.interruption`). A
signal to one rank reaches the others by `SignalWatch`.

An error ends the run too: see `algorithms.loop.save_on_error`.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import _TunerExitException

from lit_rl import interruption
from lit_rl.algorithms.loop.save_on_error import SaveOnError, folder_of, validates_next
from lit_rl.callbacks.checkpoint_files import is_whole
from lit_rl.callbacks.signal_watch import SignalWatch
from lit_rl.callbacks.slurm import requeue, requeue_signal
from lit_rl.callbacks.terminal import let_go_of_the_terminal
from lit_rl.callbacks.timed_checkpoint import save_step


def _say(text: str) -> None:
    """Print from a signal handler, in a thread of its own.

    The handler may have interrupted a write: a second write to the same stream is refused in the same thread, and waits
    in another. `_thread` starts one without a lock that the main thread might hold.
    """
    _thread.start_new_thread(rank_zero_info, (text,))


class GracefulStop(SaveOnError):
    """A stop at the next optimizer step, on which all ranks agree, in place of Lightning's signal handler.

    Lightning broadcasts inside the handler: with one rank generating and another waiting, that hangs. Here the handler
    sets a flag, on which all ranks agree between two optimizer steps. Where a signal comes in work that may be
    abandoned, the handler ends that work, and the ranks agree after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signum: int | None = None
        """The received signal; None before any."""
        self._before: dict[int, Any] = {}
        self.gave_up = False
        """Whether the signal came in work that was abandoned."""
        self.saved: Path | None = None
        """The checkpoint of the step that the run stopped at; None while there is none."""
        self._watch: SignalWatch | None = None
        self._twice: tuple[int | None, ...] = (signal.SIGHUP,)
        """Signals that one cause may send twice: an ending shell and the kernel; Slurm and torchrun, which forwards
        it."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.signum, self.gave_up, self.saved = None, False, None
        if threading.current_thread() is not threading.main_thread():
            return
        interruption.listen(lambda: self._give_up(trainer), several=trainer.world_size > 1)
        self._twice = (signal.SIGHUP, requeue_signal(trainer))
        self._watch = SignalWatch(lambda: self.signum, trainer.world_size, trainer.global_rank)
        for signum in signals_of(trainer):
            self._before[signum] = signal.signal(signum, lambda number, frame: self._on_signal(trainer, number))

    def _on_signal(self, trainer: L.Trainer, number: int) -> None:
        assert self._watch is not None
        again = self.signum is not None and self._watch.was_sent_here()
        if again or (number == self.signum and number in self._twice):
            return interruption.ask()
        if self.signum is not None:
            self._restore(leaves=number)
            signal.raise_signal(number)  # for the previous handler
            return
        self.signum = number
        if number == signal.SIGHUP:
            let_go_of_the_terminal()
        self._watch.begin()
        what = "stopping and saving" if folder_of(trainer) else "stopping; nothing is saved, as checkpoints are off"
        with contextlib.suppress(RuntimeError):  # no thread can be started: it stops silently
            _say(f"{signal.Signals(number).name}: {what}. Once more to stop at once.")
        interruption.ask()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.fit_loop._should_accumulate():
            return
        # A validation that is due is begun, and ends before its first batch: the next start makes it.
        if self._is_to_end(trainer) and not validates_next(trainer):
            folder = folder_of(trainer)
            if folder is not None:
                self.saved = folder / f"step_{trainer.global_step:08d}.ckpt"
                save_step(trainer, self.saved)
            trainer.should_stop = True
            trainer.fit_loop.epoch_loop._skip_next_val = True  # Lightning validates where `should_stop` is set
            self._requeue(trainer)

    def _is_to_end(self, trainer: L.Trainer) -> bool:
        """Tell whether a signal ends the run, the same on every rank, and set `signum` to it. A collective."""
        if trainer.world_size > 1:
            mine = torch.tensor(float(self.signum or 0), device=trainer.strategy.root_device)
            self.signum = int(trainer.strategy.reduce(mine, reduce_op="max")) or None  # pyright: ignore
        if self.signum is not None:
            interruption.agree_to_stop()
        return self.signum is not None

    def _requeue(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and self.signum == requeue_signal(trainer):
            requeue()

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        super().on_validation_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)
        # Every rank has as many batches, so all get here. Half a validation is dropped: the next start makes it anew.
        if self._place is not None and self._is_to_end(trainer):
            self._give_up(trainer)

    def _give_up(self, trainer: L.Trainer) -> NoReturn:
        """End the run in the middle of a rollout or a validation, in the state before it. Every rank gets here."""
        self._is_to_end(trainer)
        self.gave_up, in_validation = True, trainer.validating
        self.saved = self._save_place(trainer, in_validation=in_validation, anew=in_validation)
        self._requeue(trainer)
        trainer.training = True
        call._call_callback_hooks(trainer, "on_train_end")
        call._call_lightning_module_hook(trainer, "on_train_end")
        raise _TunerExitException  # the only exception that Lightning takes for a regular end of a loop

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self._place is not None and self._is_to_end(trainer):
            self.saved = self._save_place(trainer, in_validation=False)
            trainer.should_stop = True
            self._requeue(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._restore()

    def saves_after(self, exception: BaseException) -> bool:
        again = isinstance(exception, KeyboardInterrupt) and self.signum is not None
        return super().saves_after(exception) and not again

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore()
        super().on_exception(trainer, pl_module, exception)

    def is_saved(self, path: Path) -> bool:
        return is_whole(path)

    def save(self, trainer: L.Trainer, path: Path) -> None:
        save_step(trainer, path)

    def _restore(self, leaves: int | None = None) -> None:
        interruption.forget()
        if self._watch is not None:
            self._watch.end(leaves)
        for signum, handler in self._before.items():
            said = signum == self.signum and signum in self._twice  # and the run is about to end
            signal.signal(signum, signal.SIG_IGN if said else handler)
        self._before = {}
        self._watch = None  # with its store: the next job of a sweep must find nothing of this one


def signals_of(trainer: L.Trainer) -> list[int]:
    """Return the signals that save and end a run. SIGHUP is none of them where it is ignored, as under `nohup`."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    asked = requeue_signal(trainer)
    return [signal.SIGINT, signal.SIGTERM, *hangup, *([] if asked is None else [asked])]
