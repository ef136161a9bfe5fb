"""Short runs of methods with a reference, and the files that precomputed log-probs leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from small_rollouts import trainer

from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.tasks import AdditionPairs


class Losses(L.Callback):
    """The loss of every micro-batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


def data(**settings: Any) -> PreferenceDataModule:
    task = settings.pop("task", None) or AdditionPairs(max_operand=12, val_rows=7)
    return PreferenceDataModule(task=task, **{"batch_size": 8, "val_batch_size": 5, **settings})


def fit(tmp_path: Path, module: Any, source: PreferenceDataModule | None = None, **settings: Any) -> list[float]:
    """The losses of four steps of two micro-batches, then those of the validation."""
    losses, resumed = Losses(), settings.pop("ckpt_path", None)
    settings = {"max_steps": 4, "accumulate_grad_batches": 2, **settings}
    callbacks = [losses, *settings.pop("callbacks", [])]
    runner = trainer(tmp_path, limit_val_batches=1.0, num_sanity_val_steps=2, callbacks=callbacks, **settings)
    source = source or data()
    runner.fit(module, datamodule=source, ckpt_path=resumed)
    runner.validate(module, datamodule=source, verbose=False)
    return [*losses.seen, float(runner.callback_metrics["val/loss"])]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


class Look(L.Callback):
    """The reference before the fit and after the log-probs were taken."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.held.append(pl_module.reference_policy)

    on_train_start = on_fit_start
