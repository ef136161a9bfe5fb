"""A short run whose reward model is spread by FSDP2 over two processes, or whole in one (`dist_jobs.py`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dist_equal
import torch
from dist_mesh import CLIP, GRPO, SGD
from transformers import AutoConfig, AutoModelForSequenceClassification

from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.core.errors import RewardError
from lit_rl.models.language_model import LanguageModel
from lit_rl.rewards.model_rewards import RewardModel
from lit_rl.rewards.weighted_rewards import Rewards

STEPS = 4
ROWS = (5, 1)
"""Texts that each rank scores by itself, two in a batch: three calls of the model, and one."""


def scorer_in(folder: Path) -> str:
    """A reward model of random weights, which rank 0 writes: it starts the other, or the two run already."""
    path = folder / "scorer"
    if int(os.environ.get("LOCAL_RANK", 0)):
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        return str(path)
    tiny = LanguageModel("tiny")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(tiny.path, num_labels=1))
    model.save_pretrained(path)
    tiny.tokenizer.save_pretrained(path)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return str(path)


def texts_of(rank: int) -> list[str]:
    return [str(number) * (number + 1) for number in range(1, ROWS[rank] + 1)]


def scored(scorer: RewardModel, rank: int) -> list[Any]:
    texts = texts_of(rank)
    return scorer(prompts=["1+1="] * len(texts), completions=texts)


def told(scorer: RewardModel, rank: int) -> str:
    """What this rank is told where a text of the second is too long."""
    scorer.max_length = 8
    text = "1" if rank == 0 else "1" * 20
    try:
        scorer(prompts=["1="], completions=[text])
    except RewardError as error:
        return str(error)
    return ""


def run(name: str, folder: Path, devices: int, **more: Any) -> None:
    """Train with clipping, validate, and leave `name.pt`: with what each rank holds of the reward model, and says."""
    module, data = dist_equal.parts(*GRPO, *SGD)
    path = scorer_in(folder)
    scorer = RewardModel(path, batch_size=2)
    module.reward_functions = Rewards(scorer)
    trainer = dist_equal.trainer(folder, devices, max_steps=STEPS, gradient_clip_val=CLIP, **more)
    trainer.fit(module, datamodule=data)
    metrics = dist_equal.logged(trainer)
    trainer.limit_val_batches = 1.0
    trainer.validate(module, datamodule=data, verbose=False)
    rank, beside = trainer.global_rank, {}
    if devices > 1:
        whole = RewardModel(path, batch_size=2)
        mine = {"scores": scored(scorer, rank), "whole": scored(whole, rank)}
        mine |= {"bytes": scorer.weight_bytes, "whole_bytes": whole.weight_bytes, "told": told(scorer, rank)}
        beside = {"ranks": module.ranks.objects(mine)}
    dist_equal.leave(module, trainer, folder / f"{name}.pt", metrics=metrics | dist_equal.logged(trainer), **beside)


def main(folder: Path) -> None:
    run("grpo", folder, 2, strategy=FSDP2Strategy())
