"""Short DPO runs, of losses over the step and a precomputed reference, in one process or in two (`dist_jobs.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dist_equal
import torch

from lit_rl.algorithms import DPO, Constant
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.tasks import AdditionPairs
from lit_rl.ops import preference_losses

RUNS: dict[str, dict[str, Any]] = {
    "precomputed": {
        "preference": {"sigmoid": preference_losses.sigmoid, "sft": preference_losses.sft},
        "precompute_reference": True,
    },
    "aot": {"preference": preference_losses.aot, "precompute_reference": True},
    "live": {"preference": {"aot_unpaired": preference_losses.aot_unpaired, "sft": preference_losses.sft}},
}


def run(name: str, folder: Path, devices: int) -> None:
    """Leaves the trained weights, and what training and validation logged, in `NAME.pt`."""
    module = DPO("tiny", optimizer=ByPath("torch.optim.SGD", lr=0.1), scheduler=Constant(),
                 sampling=Sampling(max_new_tokens=6), **RUNS[name])  # fmt: skip
    data = PreferenceDataModule(task=AdditionPairs(max_operand=6, val_rows=6), batch_size=8, val_batch_size=4)
    trainer = dist_equal.trainer(
        folder, devices, max_steps=3, accumulate_grad_batches=2, log_every_n_steps=3, limit_val_batches=1.0
    )
    trainer.fit(module, datamodule=data)
    metrics = dist_equal.logged(trainer)
    trainer.validate(module, datamodule=data, verbose=False)
    metrics |= dist_equal.logged(trainer)
    if trainer.is_global_zero:
        torch.save({"weights": module.policy.state_dict(), "metrics": metrics}, folder / f"{name}.pt")


def main(folder: Path) -> None:
    for name in RUNS:
        run(name, folder, 2)
