"""Short runs of KTO and BCO with a precomputed reference, in one process or in two (`dist_jobs.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_rl.algorithms import BCO, KTO, Constant
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.algorithms.terms.verdict_terms import DensityRatio
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.tasks import AdditionPairs

RUNS: dict[str, Any] = {"kto": KTO, "bco": BCO}


def run(name: str, folder: Path, devices: int) -> None:
    """Leaves the trained weights and the metrics of the training in `NAME.pt`."""
    more = {"prompt_weights": DensityRatio(sample_rows=30)} if name == "bco" else {}
    module = RUNS[name]("tiny", optimizer=ByPath("torch.optim.SGD", lr=0.1), scheduler=Constant(),
                        sampling=Sampling(max_new_tokens=6), precompute_reference=True, **more)  # fmt: skip
    data = PreferenceDataModule(task=AdditionPairs(max_operand=4, val_rows=6), batch_size=8, val_batch_size=5)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_steps=5,
        default_root_dir=folder, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, accumulate_grad_batches=2, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("train/")}
    if trainer.is_global_zero:
        torch.save({"weights": module.policy.state_dict(), "metrics": metrics}, folder / f"{name}.pt")


def main(folder: Path) -> None:
    for name in RUNS:
        run(name, folder, 2)
