"""`bf16-true` over two real processes: gradients are summed in float32 over micro-batches and ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import dist_equal
import pytest
import torch
from dist_equal import left
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_rl.algorithms import GRPO, SFT, Constant
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.algorithms.optim.split_adamw import join, split
from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition, AdditionText
from lit_rl.models import LanguageModel

pytestmark = [pytest.mark.dist, pytest.mark.all]

STEPS = 3
SAMPLING = Sampling(max_new_tokens=4)
HOW: dict[str, Any] = {"optimizer": ByPath("torch.optim.SGD", lr=0.3), "scheduler": Constant(), "sampling": SAMPLING}


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def parts(name: str) -> tuple[Any, Any]:
    if name == "sft":
        rows = AdditionText(30, 0).train()[:8]
        return SFT("tiny", **HOW), SupervisedDataModule(rows=rows, batch_size=8, shuffle=False, val_fraction=0.0)
    rows = Addition(30, 0).train()[:8]
    return (
        GRPO("tiny", length, group_size=4, beta=0.1, **HOW),
        RolloutDataModule(rows=rows, prompts_per_rollout=8, val_fraction=0.0),
    )


def run(name: str, folder: Path, devices: int, accumulate: int = 2, **more: Any) -> None:
    """Train and leave `name.pt`: what float32 weights would be, what computes, and what was logged."""
    module, data = parts(name)
    precision = {"precision": "bf16-true", **more}
    trainer = dist_equal.trainer(
        folder, devices, max_steps=STEPS, accumulate_grad_batches=accumulate, gradient_clip_val=1.0, **precision
    )
    trainer.fit(module, datamodule=data)
    state = trainer.optimizers[0].state
    masters = {key: whole(master(p, state.get(p, {}))) for key, p in module.policy.named_parameters()}
    gradients = {str(p.grad.dtype) for p in module.policy.parameters() if p.grad is not None}
    weights = {key: whole(p) for key, p in module.policy.named_parameters()}
    every = module.ranks.objects({key: float(w.float().sum()) for key, w in weights.items()})
    metrics = dist_equal.logged(trainer)
    if trainer.is_global_zero:
        left = {"weights": masters, "working": weights, "metrics": metrics, "gradients": sorted(gradients)}
        torch.save({**left, "alike": all(one == every[0] for one in every)}, folder / f"{name}.pt")


def master(weight: Tensor, state: dict[str, Tensor]) -> Tensor:
    return join(weight.detach(), state["remainder"]) if "remainder" in state else weight


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def main(folder: Path) -> None:
    run("sft", folder, 2)
    (folder / "fsdp").mkdir(exist_ok=True)
    run("sft", folder / "fsdp", 2, strategy=FSDP2Strategy())
    run("grpo", folder / "fsdp", 2, strategy=FSDP2Strategy())


ROUNDING = 2**-7
"""How far a gradient may be from another sum of the same rows, relative: each micro-batch's is rounded to 8 bits."""


def moved(run: dict[str, dict[str, Tensor]]) -> Tensor:
    initial = dict(LanguageModel("tiny", dtype="bfloat16").load().named_parameters())
    return torch.cat([(run["weights"][name].float() - p.detach().float()).flatten() for name, p in initial.items()])


@pytest.mark.parametrize("folder", [".", "fsdp"], ids=["ddp", "fsdp2"])
def test_two_processes_move_the_masters_as_one_does(folder, two, one):
    """Two ranks of two micro-batches have the same rows in a sum as one of four."""
    ours, theirs = left(two / folder, "sft"), one("sft", 4)
    assert ours["alike"], "the ranks hold different weights"
    change = moved(theirs)
    far = moved(ours) - change
    if folder == "fsdp":  # its masters are the weights as stored, which here are not bfloat16's
        initial = dict(LanguageModel("tiny").load().named_parameters())
        began = torch.cat([(p.detach() - p.detach().bfloat16().float()).flatten() for p in initial.values()])
        far = far - began
    assert change.norm() > 0.1
    # These then round to other weights, so later gradients differ by more: by 3 to 4 percent, as the processor has
    # products of bfloat16 or not.
    rounding = (8 if folder == "fsdp" else 1) * ROUNDING
    assert far.norm() <= rounding * change.norm()
    assert ours["metrics"]["train/grad_norm"] == pytest.approx(theirs["metrics"]["train/grad_norm"], rel=rounding)


def test_fsdp2_holds_float32_shards_and_generates_with_them(two):
    run = left(two / "fsdp", "grpo")
    assert {weight.dtype for weight in run["working"].values()} == {torch.float32}
    assert run["alike"] and all(map(math.isfinite, run["metrics"].values()))
    assert run["metrics"]["train/reward_std"] > 0 and run["metrics"]["train/grad_norm"] > 0


def test_ddp_computes_with_bfloat16(two):
    run = left(two, "sft")
    assert {weight.dtype for weight in run["working"].values()} == {torch.bfloat16}
    for name, weight in run["working"].items():
        rounded, remainder = torch.zeros_like(weight), torch.zeros_like(weight, dtype=torch.int16)
        split(run["weights"][name], rounded, remainder)
        assert torch.equal(weight, rounded), name
        assert remainder.any(), name
