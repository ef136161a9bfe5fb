"""What a run writes to and cannot: trackers that raise, and files of its folder that are not to be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers.logger import Logger


class Tracker(Logger):
    """One like W&B, whose every call fails."""

    name = version = "tracker"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        raise ConnectionError("the tracker is not there")

    log_hyperparams = log_table = save = finalize = after_save_checkpoint = log_metrics  # pyright: ignore

    @property
    def experiment(self) -> Any:
        raise ConnectionError("the tracker is not there")


class Spoiled(L.Callback):
    """Samples have a file where their folder belongs; the disk of `metrics.jsonl` is full from the first step on."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        folder = Path(trainer.default_root_dir)
        (folder / "samples").write_text("")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (Path(trainer.default_root_dir) / "metrics.jsonl").rename(Path(trainer.default_root_dir) / "before.jsonl")
        (Path(trainer.default_root_dir) / "metrics.jsonl").symlink_to("/dev/full")
