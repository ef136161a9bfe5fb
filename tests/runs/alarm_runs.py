"""Short runs with an alarm that rings when it is told to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_rl.algorithms import GRPO, AdamW, Evaluation
from lit_rl.callbacks import Alarm, TimedCheckpoint
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.rewards import exact_match


class AtLooks(Alarm):
    """Something is wrong at the looks that it is told."""

    key = "at_looks"
    watched = ("train/loss",)

    def __init__(self, wrong: set[int], **settings) -> None:
        super().__init__(**settings)
        self.wrong, self.looks = wrong, 0

    def problem(self, metrics: Mapping[str, float]) -> str | None:
        self.looks += 1
        return f"this is look {self.looks}" if self.looks in self.wrong else None


def fitted(path: Path, alarm: Alarm, steps: int = 8, **settings) -> L.Trainer:
    """A run of as many rollouts, of two optimizer steps each, saved after each step."""
    module = GRPO(
        "tiny",
        exact_match,
        group_size=4,
        minibatches=2,
        sampling=Sampling(max_new_tokens=6),
        optimizer=AdamW(lr=1e-3),
        evaluation=Evaluation(limit=4),
        beta=0.1,
    )
    data = RolloutDataModule(task=Addition(max_operand=5, val_rows=4), prompts_per_rollout=4)
    return fitted_with(module, data, path, alarm, 2 * steps, **settings)


def fitted_with(
    module: L.LightningModule, data: L.LightningDataModule, path: Path, alarm: Alarm, steps: int, **settings
) -> L.Trainer:
    """A run of as many optimizer steps, saved after each."""
    checkpoint = TimedCheckpoint(
        dirpath=path / "checkpoints", filename="{step}", save_top_k=-1, monitor="step", every_n_train_steps=1
    )
    trainer = L.Trainer(
        default_root_dir=path,
        max_steps=steps,
        log_every_n_steps=1,
        callbacks=[checkpoint, alarm],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        accelerator="cpu",
        **settings,
    )
    path.mkdir(exist_ok=True)
    trainer.fit(module, datamodule=data)
    return trainer


def saved(path: Path, step: int) -> dict[str, Any]:
    return torch.load(path / "checkpoints" / f"step={step}.ckpt", weights_only=True)
