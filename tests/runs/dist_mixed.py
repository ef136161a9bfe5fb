"""Short runs with `bf16-mixed` under FSDP2 in two processes, and without it in one (`dist_jobs.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dist_equal
from dist_mesh import CLIP, GRPO, OFFLINE, SGD

from lit_rl.algorithms.optim.strategies import FSDP2Strategy

AS_UNDER_FSDP2 = ["generator.speedups={lean_steps: false}", "model.speedups={shared_prompts: false}"]
"""FSDP2 does neither. In float32 they change the last bits, in bfloat16 how each product is rounded."""
SHAPES: dict[str, list[str]] = {"grpo": [*GRPO, *SGD, *AS_UNDER_FSDP2], "dpo": ["algo=dpo", *OFFLINE]}
STEPS = 4


def run(name: str, folder: Path, devices: int, accumulate: int = 1, **more: Any) -> None:
    """Train with clipping, validate, and leave `name.pt`."""
    module, data = dist_equal.parts(*SHAPES[name])
    trainer = dist_equal.trainer(
        folder, devices, max_steps=STEPS, gradient_clip_val=CLIP, accumulate_grad_batches=accumulate,
        precision="bf16-mixed", **more,
    )  # fmt: skip
    dist_equal.train_and_leave(module, data, trainer, folder / f"{name}.pt")


def main(folder: Path) -> None:
    for name in SHAPES:
        run(name, folder, 2, strategy=FSDP2Strategy())
