"""A checkpoint when an error ends a run: of a generator, an environment, a reward or a user's callback.

A checkpoint that any callback writes between an optimizer step and a validation that is due records that it is due.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_rl.algorithms.rollouts.checkpoints import rng_state, set_rng_state
from lit_rl.core import upstream
from lit_rl.core.errors import GenerationError, NumericError, StorageError

Saved = TypeVar("Saved")
_LIBRARIES = ("lit_rl", "lightning", "pytorch_lightning")


class SaveOnError(L.Callback):
    """A callback that saves the run as it was after its last optimizer step, or validation, if an error ends it.

    Every module of lit_rl adds it (`configure_callbacks`). The file is next to those of the Trainer's checkpoint
    callback: `step_00000012.ckpt`. Nothing is saved if checkpoints are off, nor after an error in the middle of an
    optimizer step, whose counts belong to no place to resume from.
    """

    def __init__(self) -> None:
        self._place: dict[str, Any] | None = None
        self._last_place: dict[str, Any] | None = None
        """The place at the end of the training, after which a hook may still raise."""
        self._validated = False
        self._failed = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._place, self._last_place, self._failed = None, None, False

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Only at the end of an optimizer step on every rank: there is no half-accumulated gradient to save.
        if upstream.is_accumulating(trainer):
            self._place = None
        else:
            self._take_snapshot(trainer)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._validated = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        alone = trainer.state.fn == TrainerFn.VALIDATING
        loop: Any = trainer.validate_loop if alone else trainer.fit_loop.epoch_loop.val_loop
        if alone or trainer.state.fn == TrainerFn.FITTING:
            _refuse_stop_iteration(
                loop.batch_progress.current, "a validation", f"at optimizer step {trainer.global_step}"
            )
        if self._place is not None:
            self._take_snapshot(trainer)
            self._validated = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop
        _refuse_stop_iteration(
            loop.batch_progress.current, "the training", f"behind optimizer step {trainer.global_step}"
        )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        epochs: Any = trainer.fit_loop.epoch_progress.current
        if epochs.ready > max(epochs.started, epochs.completed) or epochs.processed > epochs.completed:
            raise _stop_iteration_error(
                "the training", f"where an epoch begins or ends, at optimizer step {trainer.global_step}"
            )
        self._last_place, self._place = self._place, None

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._place = None

    def _take_snapshot(self, trainer: L.Trainer) -> None:
        """Record the state of loops and data, which a failed rollout advances, and of torch's generators, from which a
        reward function may draw."""
        self._place = {
            "epoch": trainer.current_epoch,
            "fit_loop": trainer.fit_loop.state_dict(),
            "rng": rng_state(trainer.strategy.root_device),
        }

    def saves_after(self, exception: BaseException) -> bool:
        """Tell whether to save after this exception: not after a NumericError, whose weights may be broken."""
        return not isinstance(exception, NumericError)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if trainer.state.fn != TrainerFn.FITTING or not self.saves_after(exception):
            return
        if self._last_place is not None:  # the loops have ended, and their state is the end of the run
            self._place, self._last_place = {"rng": self._last_place["rng"]}, None
        together = trainer.world_size == 1 or (isinstance(exception, GenerationError) and exception.on_every_rank)
        # In a step that has begun and not ended the module's counts match no place of the loop.
        steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        in_a_step = getattr(trainer.lightning_module, "in_a_step", steps.ready > steps.completed)
        if in_a_step and not isinstance(exception, GenerationError):
            return
        how: dict[str, Any] = {"in_validation": trainer.validating and not self._validated, "alone": not together}
        how["folder"] = folder_of(trainer)  # of the checkpoint callback, which may be the one that fails to save
        try:
            path = save_without_user_callbacks(trainer, lambda: self._save_place(trainer, **how))
        except Exception as error:  # a full disk, or a module that fails to save
            said = f"(No checkpoint of step {trainer.global_step} could be saved: {type(error).__name__}: {error})"
            return exception.add_note(said)
        finally:
            self._place = None
        if path is not None:
            stopped = not isinstance(exception, Exception)
            what = "The rollout failed." if isinstance(exception, GenerationError) else "The run ends with an error."
            what = f"{type(exception).__name__}." if stopped else what
            rank_zero_info(f"{what} Everything up to optimizer step {trainer.global_step} is saved: {path}")

    def _save_place(
        self,
        trainer: L.Trainer,
        *,
        in_validation: bool,
        alone: bool = False,
        anew: bool = False,
        folder: Path | None = None,
    ) -> Path | None:
        """Save the run as it was after its last optimizer step, or validation; no training is lost.

        Args:
            in_validation: Whether a validation has begun and not ended.
            alone: Whether the other ranks do not get here.
            anew: Whether to replace a checkpoint of this step, which may not contain the validation.
            folder: Folder of the checkpoint; None is the Trainer's.

        Returns:
            The checkpoint; None if none can be saved.
        """
        if _ends_step(trainer):  # as any callback saves here
            self._place, anew = {"rng": rng_state(trainer.strategy.root_device)}, False
        if self._place is not None and in_validation:
            rng = self._place["rng"]
            self._take_snapshot(trainer)
            self._place = {**self._place, "fit_loop": _before_validation(self._place["fit_loop"]), "rng": rng}
        folder = folder or folder_of(trainer)
        if self._place is None or folder is None or alone:  # saving takes every rank
            return None
        path = folder / f"step_{trainer.global_step:08d}.ckpt"
        if anew or not trainer.strategy.broadcast(self.is_saved(path)):
            self._failed = "fit_loop" in self._place
            set_rng_state(self._place["rng"], trainer.strategy.root_device)
            self.save(trainer, path)
        return path

    def is_saved(self, path: Path) -> bool:
        """Tell whether a usable checkpoint exists."""
        return path.exists()

    def save(self, trainer: L.Trainer, path: Path) -> None:
        """Write a full checkpoint, even in a run whose checkpoints contain only weights."""
        trainer.save_checkpoint(path, weights_only=False)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if "loops" not in checkpoint:
            return  # weights only
        if self._failed and self._place is not None:
            checkpoint["epoch"] = self._place["epoch"]
            checkpoint["loops"]["fit_loop"] = self._place["fit_loop"]
        elif _between_step_and_validation(trainer):
            checkpoint["loops"]["fit_loop"] = _validation_to_begin(checkpoint["loops"]["fit_loop"])


def save_without_user_callbacks(trainer: L.Trainer, save: Callable[[], Saved]) -> Saved:
    """Save; if that fails, retry without the state of the user's own callbacks, one of which may be the cause."""
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    known = [each for each in callbacks if type(each).__module__.partition(".")[0] in _LIBRARIES]
    try:
        return save()
    except (Exception, SystemExit) as error:
        if len(known) == len(callbacks) or isinstance(error, OSError | StorageError):
            raise
        trainer.callbacks = known  # pyright: ignore[reportAttributeAccessIssue]
        try:
            saved = save()
        finally:
            trainer.callbacks = callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if saved is not None:
            others = ", ".join(type(each).__name__ for each in callbacks if each not in known)
            rank_zero_warn(f"Saved without the state of {others}: {type(error).__name__}: {error}")
        return saved


def _refuse_stop_iteration(batches: Any, what: str, where: str) -> None:
    """Raise an error if a user's StopIteration has ended a loop of Lightning's, which takes it for the end of the data.

    Then a batch was started and is not completed. A batch that a hook skips by returning -1 is not started.
    """
    if batches.processed < batches.ready or batches.completed < batches.started:
        raise _stop_iteration_error(what, where)


def _stop_iteration_error(what: str, where: str) -> RuntimeError:
    return RuntimeError(
        f"A function that {what} calls (a callback, a loss, a logger) raised StopIteration {where}, and what comes "
        "then would be left out without a word: next(iterator) raises it where nothing is left. Give it a default, "
        "next(iterator, None), or a new iterator."
    )


def _ends_step(trainer: L.Trainer) -> bool:
    """Tell whether callbacks are in `on_train_batch_end` of the last micro-batch of an optimizer step."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    at_end = trainer.training and batches.processed == batches.ready == batches.completed + 1
    return at_end and not upstream.is_accumulating(trainer)


def folder_of(trainer: L.Trainer) -> Path | None:
    """Return the folder of checkpoints; None if there is none, or not on a disk of this machine (``s3://...``)."""
    folder = None if trainer.fast_dev_run else getattr(trainer.checkpoint_callback, "dirpath", None)  # pyright: ignore
    return None if folder is None or "://" in str(folder) else Path(folder)


def _between_step_and_validation(trainer: L.Trainer) -> bool:
    """Tell whether a callback saves at the end of a step, and a validation is due in the middle of an epoch.

    Lightning skips this validation when such a checkpoint is resumed, unless the checkpoint records that it has begun.
    (At the end of an epoch Lightning runs it anyway.)
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    current: Any = progress.current
    ends_batch = trainer.training and current.processed == current.completed + 1
    if not ends_batch or progress.is_last_batch or upstream.is_accumulating(trainer):
        return False
    # A timer starts anew.
    return not upstream.validates_by_timer(trainer) and upstream.validates_next(trainer)


def _validation_to_begin(fit_loop: dict[str, Any]) -> dict[str, Any]:
    """Return loops at the end of a batch, changed to the first batch of the validation after it."""
    train, validation = "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"
    done = {part: {**fit_loop[train][part]} for part in ("total", "current")}
    for counts in done.values():
        counts["completed"] += 1
    begun = {
        "total": _counts_in_next_batch(fit_loop[validation]["total"]["completed"]),
        "current": _counts_in_next_batch(0),
        "is_last_batch": False,
    }
    return {
        **fit_loop,
        train: {**fit_loop[train], **done},
        validation: {**fit_loop[validation], **begun},
    }


def _before_validation(fit_loop: dict[str, Any]) -> dict[str, Any]:
    """Return loops that stopped in a validation, set back to its first batch, so that no metrics are lost."""
    key = "epoch_loop.val_loop.batch_progress"
    done = fit_loop[key]["current"]["completed"]
    counts = {part: _counts_in_next_batch(fit_loop[key][part]["completed"] - done) for part in ("total", "current")}
    return {**fit_loop, key: {**fit_loop[key], **counts, "is_last_batch": False}}


def _counts_in_next_batch(done: int) -> dict[str, int]:
    """Return Lightning's counts with `done` batches completed and the next one started."""
    return {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
