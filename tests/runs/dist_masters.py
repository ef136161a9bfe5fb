"""Short runs with `bf16-true`, in one process or in two (`dist_jobs.py`); what each did is left in the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dist_equal
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_rl.algorithms import GRPO, SFT, Constant
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.algorithms.optim.split_adamw import join
from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition, AdditionText

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
