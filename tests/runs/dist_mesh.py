"""Short runs under `strategy=fsdp_tp`, in two processes or in four, and in one (`dist_jobs.py`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dist_equal
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rl.algorithms.optim.strategies import FSDPTPStrategy
from lit_rl.callbacks.loggers import WriteFailures
from lit_rl.callbacks.samples import gather_on_rank_zero
from lit_rl.rewards.weighted_rewards import Rewards

SGD = ["optimizer=by_path", "optimizer.path=torch.optim.SGD", "optimizer.lr=0.3", "scheduler=constant"]
"""Plain SGD: the change of the weights is the gradient."""
OFFLINE = ["data.task.max_operand=9", "data.task.val_rows=4", "data.batch_size=8", *SGD]
GRPO = [
    "data.task.max_operand=9",
    "data.task.val_rows=4",
    "data.prompts_per_rollout=4",
    "algo.group_size=4",
    "algo.minibatches=2",
    "algo.beta=0.2",
    "reference=frozen_copy",
]
SHAPES: dict[str, list[str]] = {
    "grpo": [*GRPO, *SGD],
    "grpo-adamw": [*GRPO, "optimizer.lr=1e-3"],
    "grpo-hf": [*GRPO, *SGD, "generator=hf"],
    "dpo": ["algo=dpo", *OFFLINE, "model.gradient_checkpointing=true"],
    "sft": ["algo=sft", *OFFLINE],
}
OTHERS = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"head_dim": 32}}
"""Other families, with SFT: an output projection with a bias, an untied head, grouped heads, norms of heads."""
STEPS, STOP = 4, 3
"""GRPO takes two steps a rollout: it stops in the middle of one."""
CLIP = 0.05


def told_otherwise(completions: list[str]) -> list[float]:
    """Rewards that are others on the second rank of a tensor-parallel group, whose do not count."""
    second = int(os.environ.get("LOCAL_RANK", 0)) % 2
    return [float(sum(text.encode()) % 5) + second * number**2 for number, text in enumerate(completions)]


def _keeps(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False)


def other_family(kind: str, folder: Path) -> Path:
    """A folder with a model of another family, of random weights, beside the tokenizer of the tiny one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lit_rl.models.language_model import LanguageModel

    tiny = LanguageModel("tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        kind, num_hidden_layers=2, vocab_size=259, tie_word_embeddings=kind != "llama", eos_token_id=258,
        pad_token_id=256, bos_token_id=None, **sizes, **OTHERS[kind],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:  # ones and zeros would hide a gradient that is added up wrong
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder


def run(
    name: str, folder: Path, devices: int, *more: str, shape: str = "", again: Path | None = None, **settings: Any
) -> None:
    """Train with clipping, validate, and leave `name.pt`: weights, metrics, and what rank 0 saw of rows."""
    module, data = dist_equal.parts(*SHAPES[shape or name], *more)
    if "grpo" in name:
        module.reward_functions = Rewards(told_otherwise)
    strategy = FSDPTPStrategy(tp_size=2) if devices > 1 else "auto"
    trainer = dist_equal.trainer(
        folder, devices, strategy=strategy, max_steps=STEPS, gradient_clip_val=CLIP, enable_checkpointing=True,
        callbacks=[_keeps(folder / name)], **settings,
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=again, weights_only=True)
    metrics = dist_equal.logged(trainer)
    trainer.limit_val_batches = 1.0
    trainer.validate(module, datamodule=data, verbose=False)
    metrics |= dist_equal.logged(trainer)
    senders = gather_on_rank_zero(trainer, trainer.global_rank, WriteFailures("the test"))
    dist_equal.leave(module, trainer, folder / f"{name}.pt", metrics=metrics, senders=senders)


def _mine(folder: Path, devices: int, names: Any) -> None:
    for name in names:
        run(name, folder, devices)


def main(folder: Path) -> None:
    """Two processes, one tensor-parallel group."""
    _mine(folder, 2, ("grpo", "dpo"))
    run("grpo-again", folder, 2, shape="grpo", again=folder / "grpo" / f"step={STOP}.ckpt")
    run("grpo-adamw", folder, 2)
    run("grpo-adamw-again", folder, 2, shape="grpo-adamw", again=folder / "grpo-adamw" / f"step={STOP}.ckpt")
    for kind in OTHERS:
        run(kind, folder, 2, f"model.name={folder.parent / kind}", shape="sft")


def four(folder: Path) -> None:
    """Two groups of two."""
    run("grpo", folder, 4)


def four_all(folder: Path) -> None:
    _mine(folder, 4, SHAPES)
    run("grpo-adamw-again", folder, 4, shape="grpo-adamw", again=folder / "grpo-adamw" / f"step={STOP}.ckpt")
    for kind in OTHERS:
        run(kind, folder, 4, f"model.name={folder.parent / kind}", shape="sft")
