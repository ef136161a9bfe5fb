"""Short runs of policies over images, in one process or in two (`dist_jobs.py`). Some rows show nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import dist_equal
import torch

sys.path.append(str(Path(__file__).parents[1]))  # processes of `dist_jobs` know this folder alone

import torchvision_beside
import vision_toys

from lit_rl.algorithms import DPO, GRPO, PPO, Constant, RewardModeling
from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Digits
from lit_rl.environments import CustomEnvironment
from lit_rl.models import LanguageModel, Lora
from lit_rl.rewards import environment

STEPS = 3
TOYS = ["qwen2_vl"] if torchvision_beside.FOLDER else ["gemma3"]
"""Families with inputs of their own: `token_type_ids`; patches of all images in a row, and positions of three axes."""

SHAPES = TOYS if torchvision_beside.FOLDER else ["returned", "ppo", "dpo", "lora", "eyes", "reward", *TOYS]
SHARDED = [name for name in SHAPES if name not in ("returned", "dpo")]
"""Run under FSDP2 too: these are rollouts as PPO's, and whole texts as the reward model's."""


def by_letters(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(map(ord, message[0]["content"])) % 7) for message in completions]


class Shows:
    """Answers each turn with the row's digit again, beside the prompt's or in its place, but where the row has none."""

    def reset(self, *, seed: int, image: Any = None, held: Any = None) -> None:
        self.shown = image if held is None else held

    def step(self, action: str) -> tuple[Any, ...]:
        seen = {"type": "image", "image": self.shown}
        said = "" if self.shown is None else [seen, {"type": "text", "text": "Again?"}]
        return said or "Again?", float(sum(map(ord, action)) % 7), False, False, {}


def sgd(lr: float) -> Any:
    """Plain SGD: the change of the weights is the gradient."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def rows() -> list[dict[str, Any]]:
    """In each step's eight, the first four rows show nothing: with two ranks, one of these sees for nobody."""
    digits = Digits(val_rows=0).train()[:24]
    return [row if i // 4 % 2 else {"prompt": row["prompt"], "answer": row["answer"]} for i, row in enumerate(digits)]


def later_rows() -> list[dict[str, Any]]:
    """Every third row's digit is shown in the episode alone."""
    return [{"held" if i % 3 == 0 and key == "image" else key: row[key] for key in row} for i, row in enumerate(rows())]


def pairs() -> list[dict[str, Any]]:
    def said(text: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": text}]

    return [{**row, "chosen": said(row["answer"]), "rejected": said("no")} for row in rows()]


def model_of(name: str, folder: Path) -> LanguageModel:
    """What a run starts from."""
    if name in TOYS:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # transformers writes nothing in the others
            vision_toys.save(name, folder / name)
        if torch.distributed.is_initialized():  # else the first writes before it starts the others
            torch.distributed.barrier()
        return LanguageModel(str(folder / name), freeze=[])
    # Names of layers mean those of what sees too, so there are adapters that only images train; of "eyes" all are.
    adapted = {"lora": ["q_proj", "v_proj"], "eyes": ["out_proj", "fc1"]}
    lora = Lora(r=2, targets=adapted[name]) if name in adapted else None
    return LanguageModel("digits", freeze=[], lora=lora)


def parts(name: str, folder: Path) -> tuple[Any, Any]:
    settings: dict[str, Any] = {"sampling": Sampling(max_new_tokens=3), "scheduler": Constant()}
    model = model_of(name, folder)
    if name in ("dpo", "reward"):
        told: Any = PreferenceDataModule(rows=pairs(), batch_size=8, val_fraction=0.0, shuffle=False)
        if name == "reward":
            return RewardModeling(model, optimizer=sgd(0.05), scheduler=Constant()), told
        return DPO(model, optimizer=sgd(0.05), **settings), told
    data = later_rows() if name == "returned" else rows()
    asked = RolloutDataModule(rows=data, prompts_per_rollout=8, val_fraction=0.0, shuffle=False)
    if name == "returned":
        settings["env"] = CustomEnvironment(Shows, max_turns=2, max_tokens=120, max_observation_tokens=80)
        return GRPO(model, environment, group_size=2, beta=0.1, optimizer=sgd(0.05), **settings), asked
    if name == "ppo":
        return PPO(model, by_letters, optimizer=sgd(0.01), **settings), asked
    return GRPO(model, by_letters, group_size=2, beta=0.1, optimizer=sgd(0.05), **settings), asked


def run(name: str, folder: Path, devices: int, accumulate: int = 1, **more: Any) -> None:
    """Train, and leave `name.pt` there."""
    module, data = parts(name, folder)
    trainer = dist_equal.trainer(folder, devices, max_steps=STEPS, accumulate_grad_batches=accumulate, **more)
    dist_equal.train_and_leave(module, data, trainer, folder / f"{name}.pt")


def main(folder: Path) -> None:
    for name in SHAPES:
        run(name, folder, 2, accumulate=2)
    (folder / "fsdp").mkdir(exist_ok=True)
    for name in SHARDED:
        run(name, folder / "fsdp", 2, accumulate=2, strategy=FSDP2Strategy())
