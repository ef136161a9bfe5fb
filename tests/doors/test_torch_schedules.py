"""A scheduler of torch steps once an optimizer step, and is what its formula says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR
from transformers import get_cosine_schedule_with_warmup

from lit_rl import PPO, SFT, AdamW, RolloutDataModule, Sampling, SupervisedDataModule

ROWS = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(8)]
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "accelerator": "cpu",
}


class Rates(L.Callback):
    """The learning rates of each step, by parameter group."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.seen.append([group["lr"] for group in optimizer.param_groups])


def fit(module: Any, data: Any, folder: Path, steps: int) -> Rates:
    rates = Rates()
    trainer = L.Trainer(max_steps=steps, callbacks=[rates], default_root_dir=folder, **QUIET)
    trainer.fit(module, datamodule=data)
    return rates


def sft(scheduler: Any) -> tuple[SFT, SupervisedDataModule]:
    data = SupervisedDataModule(ROWS, batch_size=2, val_fraction=0)
    return SFT("tiny", optimizer=AdamW(lr=0.01), scheduler=scheduler), data


def half(optimizer: Any) -> SequentialLR:
    """A function of a user's: two rates of 1, then halved at every step."""
    flat, falling = LambdaLR(optimizer, lambda step: 1.0), StepLR(optimizer, step_size=1, gamma=0.5)
    return SequentialLR(optimizer, [flat, falling], milestones=[2])


@pytest.mark.parametrize(
    ("scheduler", "factors"),
    [
        (partial(StepLR, step_size=2, gamma=0.1), [1, 1, 0.1, 0.1]),
        (partial(get_cosine_schedule_with_warmup, num_warmup_steps=2, num_training_steps=4), [0, 0.5, 1, 0.5]),
        (half, [1, 1, 1, 0.5]),
    ],
    ids=["StepLR", "transformers", "function"],
)
def test_the_rates_are_those_of_the_formula(scheduler: Callable, factors: list[float], tmp_path: Path) -> None:
    assert [rate for (rate,) in fit(*sft(scheduler), tmp_path, 4).seen] == pytest.approx([0.01 * f for f in factors])


def test_all_parameter_groups_follow_it(tmp_path: Path) -> None:
    module = PPO(
        "tiny",
        lambda prompts, completions, **columns: [float(len(text)) for text in completions],
        optimizer=AdamW(lr=0.01),
        critic_lr=0.1,
        scheduler=partial(StepLR, step_size=1, gamma=0.5),
        sampling=Sampling(max_new_tokens=2),
        group_size=1,
    )
    data = RolloutDataModule([{"prompt": row["prompt"]} for row in ROWS], prompts_per_rollout=2, val_fraction=0)
    assert fit(module, data, tmp_path, 2).seen == [[0.01, 0.1], [0.005, 0.05]]
