"""Short DPO runs, of losses over the step and a precomputed reference: `python offline_dpo_ranks.py FOLDER DEVICES`."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch

from lit_rl.algorithms import DPO, Constant
from lit_rl.algorithms.optimizers import ByPath
from lit_rl.data.offline.datamodule import PreferenceDataModule
from lit_rl.data.tasks import AdditionPairs
from lit_rl.ops import preference
from lit_rl.rollout import Sampling

RUNS = {
    "precomputed": {"preference": {"sigmoid": preference.sigmoid, "sft": preference.sft}, "precompute_reference": True},
    "aot": {"preference": preference.aot, "precompute_reference": True},
    "live": {"preference": {"aot_unpaired": preference.aot_unpaired, "sft": preference.sft}},
}


def run(name: str, folder: Path, devices: int) -> None:
    """Leaves the trained weights and the validation's metrics in `NAME.pt`."""
    module = DPO("tiny", optimizer=ByPath("torch.optim.SGD", lr=0.1), scheduler=Constant(),
                 sampling=Sampling(max_new_tokens=6), **RUNS[name])  # fmt: skip
    data = PreferenceDataModule(task=AdditionPairs(max_operand=6, val_rows=6), batch_size=8, val_batch_size=4)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_steps=3,
        default_root_dir=folder, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, accumulate_grad_batches=2, log_every_n_steps=3,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    trainer.validate(module, datamodule=data, verbose=False)
    metrics |= {key: float(value) for key, value in trainer.callback_metrics.items()}
    if trainer.is_global_zero:
        torch.save({"weights": module.policy.state_dict(), "metrics": metrics}, folder / f"{name}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in RUNS:
        run(each, Path(sys.argv[1]), int(sys.argv[2]))
