"""`strategy=fsdp_tp`: a tensor-parallel group of two, and two of them under FSDP2, do what one process does."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import dist_equal
import dist_jobs
import pytest
import torch
from dist_equal import CLIP, DPO, GRPO, OFFLINE, SMALL_GRPO, assert_same_metrics, left
from lightning.pytorch.callbacks import ModelCheckpoint
from runs_helpers import assert_same
from transformers import AutoConfig, AutoModelForCausalLM

from lit_rl.algorithms.optim.strategies import FSDPTPStrategy
from lit_rl.callbacks.loggers import WriteFailures
from lit_rl.callbacks.samples import gather_on_rank_zero
from lit_rl.models.language_model import LanguageModel
from lit_rl.rewards.weighted_rewards import Rewards

pytestmark = [pytest.mark.dist, pytest.mark.all]

SHAPES: dict[str, list[str]] = {
    "grpo": GRPO,
    "grpo-adamw": [*SMALL_GRPO, "optimizer.lr=1e-3"],
    "dpo": [*DPO, "model.gradient_checkpointing=true"],
    "sft": ["algo=sft", *OFFLINE],
}
OTHERS = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"head_dim": 32}}
"""Other families, with SFT: an output projection with a bias, an untied head, grouped heads, norms of heads."""
STEPS, STOP = 4, 3
"""GRPO takes two steps a rollout: it stops in the middle of one."""


def told_otherwise(completions: list[str]) -> list[float]:
    """Rewards that are others on the second rank of a tensor-parallel group, whose do not count."""
    second = int(os.environ.get("LOCAL_RANK", 0)) % 2
    return [float(sum(text.encode()) % 5) + second * number**2 for number, text in enumerate(completions)]


def _keeps(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False)


def alone(folder: Path) -> None:
    """What is there before the processes begin."""
    for kind in OTHERS:
        other_family(kind, folder / "models" / kind)


def other_family(kind: str, folder: Path) -> None:
    """Write a folder with a model of another family, of random weights, beside the tokenizer of the tiny one."""
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
        run(kind, folder, 2, f"model.name={folder}/models/{kind}", shape="sft")


def four(folder: Path) -> None:
    """Two groups of two."""
    run("grpo", folder, 4)


TWO = ("grpo", "dpo", "grpo-adamw")
"""Of two processes in every run; SFT is run with the other families."""

assert_equal_runs = partial(dist_equal.assert_equal_runs, beyond=2e-6, moved=1e-3)


@pytest.fixture(scope="module")
def families(two: Path) -> Path:
    """Where models of other families are, made before the two processes began."""
    return two / "models"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, families: Path) -> Any:
    """`one(name)`: what one process does, made when it is first asked for."""
    folder, made = tmp_path_factory.mktemp("one"), {}

    def of(name: str) -> Any:
        if name not in made:
            other = [f"model.name={families / name}"] if name in OTHERS else []
            run(name, folder, 1, *other, shape="sft" if other else "")
            made[name] = left(folder, name)
        return made[name]

    return of


def saved(folder: Path, name: str, step: int = STEPS) -> Any:
    return torch.load(folder / name / f"step={step}.ckpt", weights_only=True)


def assert_same_training(one: Any, other: Any, name: str, families: Path) -> None:
    assert one["metrics"]["train/grad_norm"] > CLIP, "nothing was clipped"
    share = 2e-3 if name == "grpo-adamw" else 2e-4  # AdamW divides by the gradient's size, however small that is
    assert_equal_runs(one, other, share=share, start=str(families / name) if name in OTHERS else "tiny")


@pytest.mark.parametrize("name", [*TWO, *OTHERS])
def test_a_tensor_parallel_group_equals_one_process(name: str, two: Path, one: Any, families: Path) -> None:
    """Weights after four clipped steps, norms of gradients, rewards and validation.

    The second rank's reward function says other numbers than the first one's: these do not count.
    """
    assert_same_training(one(name), left(two, name), name, families)


@pytest.mark.parametrize("name", ["grpo-adamw", "grpo"])
def test_a_group_goes_on_with_the_bits_of_the_whole_run(name: str, two: Path) -> None:
    """With moments of each weight, and with SGD, which has none."""
    first, second = saved(two, name), saved(two, f"{name}-again")
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "lit_rl"):
        assert_same(first[part], second[part], part)
    assert_same_metrics(left(two, name)["metrics"], left(two, f"{name}-again")["metrics"])
    assert not (two / f"{name}-again" / f"step={STOP - 1}.ckpt").exists(), "it began anew"
    assert len(first["lit_rl"]) == 1, "the ranks of a group count as one"
    assert left(two, name)["senders"] == [0], "rows that two ranks have are written once"


def test_two_groups_under_fsdp_equal_one_process(tmp_path: Path, one: Any, families: Path) -> None:
    """Four processes: two draw the same rows, two others the rest. Its checkpoint has the rows of two ranks."""
    four = dist_equal.in_processes(dist_jobs.__file__, tmp_path, "mesh.four") / "mesh.four"
    assert_same_training(one("grpo"), left(four, "grpo"), "grpo", families)
    assert left(four, "grpo")["senders"] == [0, 2], "the first rank of each group sends its rows"
    ranks = [each["module"]["rollout"]["completions"]["response_ids"] for each in saved(four, "grpo", STOP)["lit_rl"]]
    assert len(ranks) == 2 and (ranks[0].shape != ranks[1].shape or not torch.equal(*ranks))
