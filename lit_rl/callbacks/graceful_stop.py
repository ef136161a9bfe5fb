"""Ctrl-C, SIGTERM, a terminal that is gone, Slurm's word: save and stop, within seconds. A second signal ends the
process at once.

An optimizer step that has begun is finished. A rollout, its rewards and a validation are given up: nothing was learned
from them, and the run that goes on makes them anew (`lit_rl.interruption`). A signal to one rank reaches the others by
`SignalWatch`.

An error ends the run too, of a generator, an environment, a reward or somebody's callback: what was learned until then
is saved.

A checkpoint that is written between an optimizer step and a validation that is due says so, whoever writes it.
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
from lit_rl.algorithms.rollouts.state import rng_state, set_rng_state
from lit_rl.callbacks.checkpoint_files import is_whole
from lit_rl.callbacks.signal_watch import SignalWatch
from lit_rl.callbacks.slurm import requeue, requeue_signal
from lit_rl.callbacks.terminal import let_go_of_the_terminal
from lit_rl.callbacks.timed_checkpoint import save_step
from lit_rl.errors import GenerationError, NumericError


def _say(text: str) -> None:
    """From a handler, which may have come in the middle of a write: a second write to the same stream is refused from
    the same thread, and waits from another. Of `_thread`, whose start needs no lock that the main thread might hold."""
    _thread.start_new_thread(rank_zero_info, (text,))


class GracefulStop(L.Callback):
    """Replaces Lightning's handler, which broadcasts inside the signal handler: with one rank generating and another
    waiting, that hangs. Here the handler sets a flag, on which all ranks agree between two optimizer steps; where it
    comes in work that may be given up, it ends that work, on which they agree behind it.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        """The signal that came; None while none has."""
        self._before: dict[int, Any] = {}
        self._place: dict[str, Any] | None = None
        self._validated = False
        self._failed = False
        self.gave_up = False
        """Whether it came in work that was given up."""
        self.saved: Path | None = None
        """The checkpoint of the step that the run stopped at; None while there is none."""
        self._watch: SignalWatch | None = None
        self._twice: tuple[int | None, ...] = (signal.SIGHUP,)
        """Signals that one cause may send twice: a shell that ends and the kernel; Slurm and torchrun, which passes it
        on."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.signum, self._place, self._failed, self.gave_up, self.saved = None, None, False, False, None
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
            signal.raise_signal(number)  # for whoever was there before us
            return
        self.signum = number
        if number == signal.SIGHUP:
            let_go_of_the_terminal()
        self._watch.begin()
        what = "stopping and saving" if _folder_of(trainer) else "stopping; nothing is saved, as checkpoints are off"
        with contextlib.suppress(RuntimeError):  # no thread is to be had: it stops without a word
            _say(f"{signal.Signals(number).name}: {what}. Once more to stop at once.")
        interruption.ask()

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
            folder = _folder_of(trainer)
            if folder is not None:
                self.saved = folder / f"step_{trainer.global_step:08d}.ckpt"
                save_step(trainer, self.saved)
            trainer.should_stop = True
            trainer.fit_loop.epoch_loop._skip_next_val = True  # Lightning validates where `should_stop` is set
            self._requeue(trainer)

    def _is_to_end(self, trainer: L.Trainer) -> bool:
        """Whether a signal ends the run, the same on every rank: `signum` is that signal then."""
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
        self._validated = False
        # Every rank has as many batches, so all of them ask. Half a validation is none: the next start makes it anew.
        if self._place is not None and self._is_to_end(trainer):
            self._give_up(trainer)

    def _give_up(self, trainer: L.Trainer) -> NoReturn:
        """End the run in the middle of a rollout or a validation, as it was before. Every rank comes here."""
        self._is_to_end(trainer)
        self.gave_up, in_validation = True, trainer.validating
        self.saved = self._save_place(trainer, in_validation=in_validation, anew=in_validation)
        self._requeue(trainer)
        trainer.training = True
        call._call_callback_hooks(trainer, "on_train_end")
        call._call_lightning_module_hook(trainer, "on_train_end")
        raise _TunerExitException  # the one way out of a loop that Lightning takes for a good end

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._place is None:
            return
        self._take_down(trainer)
        self._validated = True
        if self._is_to_end(trainer):
            self.saved = self._save_place(trainer, in_validation=False)
            trainer.should_stop = True
            self._requeue(trainer)

    def _take_down(self, trainer: L.Trainer) -> None:
        """Where the loops and the data stand: a rollout that cannot be drawn begins by moving them on. And torch's
        random generators, of which a reward function may draw."""
        self._place = {
            "epoch": trainer.current_epoch,
            "fit_loop": trainer.fit_loop.state_dict(),
            "rng": rng_state(),
        }

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._place = None
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore()
        together = trainer.world_size == 1 or (isinstance(exception, GenerationError) and exception.on_every_rank)
        lost = _in_a_step(trainer) and not isinstance(exception, GenerationError)
        if lost or not isinstance(exception, Exception) or isinstance(exception, NumericError):
            return
        try:
            path = self._save_place(
                trainer, in_validation=trainer.validating and not self._validated, alone=not together
            )
        except Exception as error:  # a disk that is full, or a callback that fails to save
            return exception.add_note(f"(What was learned could not be saved: {type(error).__name__}: {error})")
        if path is not None:
            what = "The rollout failed." if isinstance(exception, GenerationError) else "The run ends with an error."
            rank_zero_info(f"{what} Everything up to optimizer step {trainer.global_step} is saved: {path}")

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
        if _ends_step(trainer):  # as any callback saves here
            self._place, anew, failed = {"rng": rng_state()}, False, False
        else:
            failed = True
        if self._place is not None and in_validation:
            rng = self._place["rng"]
            self._take_down(trainer)
            self._place = {**self._place, "fit_loop": _before_validation(self._place["fit_loop"]), "rng": rng}
        folder = _folder_of(trainer)
        if self._place is None or folder is None or alone:  # saving takes every rank
            return None
        path = folder / f"step_{trainer.global_step:08d}.ckpt"
        if anew or not trainer.strategy.broadcast(is_whole(path)):
            self._failed = failed
            set_rng_state(self._place["rng"])
            save_step(trainer, path)
        return path

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._failed and self._place is not None:
            checkpoint["epoch"] = self._place["epoch"]
            checkpoint["loops"]["fit_loop"] = self._place["fit_loop"]
        elif _between_step_and_validation(trainer):
            checkpoint["loops"]["fit_loop"] = _validation_to_begin(checkpoint["loops"]["fit_loop"])

    def _restore(self, leaves: int | None = None) -> None:
        interruption.forget()
        if self._watch is not None:
            self._watch.end(leaves)
        for signum, handler in self._before.items():
            said = signum == self.signum and signum in self._twice  # and the run is about to end
            signal.signal(signum, signal.SIG_IGN if said else handler)
        self._before = {}
        self._watch = None  # with its store: the next job of a sweep is to find nothing of this one


def signals_of(trainer: L.Trainer) -> list[int]:
    """Those that end a run, which is saved. `nohup` has the end of a terminal ignored: then it is none."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    asked = requeue_signal(trainer)
    return [signal.SIGINT, signal.SIGTERM, *hangup, *([] if asked is None else [asked])]


def _in_a_step(trainer: L.Trainer) -> bool:
    """Tell whether a step has begun and not ended, so that what the module counts is of no place of the loop."""
    steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    return getattr(trainer.lightning_module, "in_a_step", steps.ready > steps.completed)


def _ends_step(trainer: L.Trainer) -> bool:
    """Tell whether callbacks are being told that the last micro-batch of an optimizer step is over."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    at_end = trainer.training and batches.processed == batches.ready == batches.completed + 1
    return at_end and not trainer.fit_loop._should_accumulate()


def _folder_of(trainer: L.Trainer) -> Path | None:
    """Where checkpoints are written; None where none are."""
    folder = getattr(trainer.checkpoint_callback, "dirpath", None)
    return None if folder is None else Path(folder)


def _validates_next(trainer: L.Trainer) -> bool:
    """Whether Lightning validates after this optimizer step, whatever has come."""
    epoch_loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    batches = sum(epoch_loop.val_loop.max_batches)
    return fetcher is not None and batches > 0 and epoch_loop._should_check_val_fx(fetcher)


def _between_step_and_validation(trainer: L.Trainer) -> bool:
    """Whether a callback saves at the end of an optimizer step, and a validation is due in the middle of an epoch.

    Lightning takes it for made where such a checkpoint is resumed, unless the checkpoint says that it has begun. (At
    the end of an epoch it makes it by itself.)
    """
    fit_loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    current: Any = progress.current
    ends_batch = trainer.training and current.processed == current.completed + 1
    if not ends_batch or progress.is_last_batch or fit_loop._should_accumulate():
        return False
    if trainer._val_check_time_interval is not None:  # pyright: ignore  # by the clock, which begins anew
        return False
    return _validates_next(trainer)


def _validation_to_begin(fit_loop: dict[str, Any]) -> dict[str, Any]:
    """Loops at the end of a batch, as if in the first batch of the validation behind it."""
    train, validation = "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"
    done = {part: {**fit_loop[train][part]} for part in ("total", "current")}
    for counts in done.values():
        counts["completed"] += 1
    begun = {
        "total": _before_a_batch(fit_loop[validation]["total"]["completed"]),
        "current": _before_a_batch(0),
        "is_last_batch": False,
    }
    return {
        **fit_loop,
        train: {**fit_loop[train], **done},
        validation: {**fit_loop[validation], **begun},
    }


def _before_validation(fit_loop: dict[str, Any]) -> dict[str, Any]:
    """Loops that stopped in a validation, as if in its first batch: half of its numbers would be lost otherwise."""
    key = "epoch_loop.val_loop.batch_progress"
    done = fit_loop[key]["current"]["completed"]
    counts = {part: _before_a_batch(fit_loop[key][part]["completed"] - done) for part in ("total", "current")}
    return {**fit_loop, key: {**fit_loop[key], **counts, "is_last_batch": False}}


def _before_a_batch(done: int) -> dict[str, int]:
    """Lightning's counts where so many batches are done and the next one has begun."""
    return {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
