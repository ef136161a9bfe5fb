"""GRPO with continuous batching is GRPO with the native loop: the same samples, and weights that move alike."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch

from lit_rl.algorithms import GRPO, AdamW, Constant
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.generation.generator import InProcessGenerator
from lit_rl.generation.hf import HFContinuousGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.rewards import exact_match


def test_it_learns_what_the_native_loop_learns(tmp_path: Path) -> None:
    ours, weights = trained(HFContinuousGenerator(), tmp_path)
    theirs, same = trained(NativeGenerator(), tmp_path)
    assert len(ours) == 5 and max(ours) > 0
    # A rounding may flip a sample once in very many, so equality is asked of the beginning only.
    assert ours[:3] == theirs[:3]
    assert weights.norm() > 0 and torch.cosine_similarity(weights, same, dim=0) > 0.9


def trained(generator: InProcessGenerator, folder: Path) -> tuple[list[float], torch.Tensor]:
    """The mean reward of every rollout, and how the weights moved, as one vector."""
    L.seed_everything(0, verbose=False)
    module = GRPO(
        "tiny",
        exact_match,
        generator=generator,
        sampling=Sampling(max_new_tokens=6),
        optimizer=AdamW(lr=5e-4),
        scheduler=Constant(),
    )
    seen: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
            seen.append(float(trainer.callback_metrics["train/reward"]))

    trainer = L.Trainer(
        max_steps=5,
        accelerator="cpu",
        logger=False,
        callbacks=[Watch()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        limit_val_batches=0,
    )
    data = RolloutDataModule(task=Addition(val_rows=8), prompts_per_rollout=8)
    before = vector(module.model.load())
    trainer.fit(module, datamodule=data)
    return seen, vector(module.policy) - before


def vector(policy: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().float().flatten().cpu() for weight in policy.parameters()])
