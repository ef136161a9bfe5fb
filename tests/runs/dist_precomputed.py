"""Short runs with a precomputed reference, in one process or in two (`dist_jobs.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dist_equal

from lit_rl.algorithms import BCO, DPO, KTO, Constant
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.algorithms.terms.verdict_terms import DensityRatio
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.tasks import AdditionPairs
from lit_rl.ops import preference_losses

STEPS = 5
"""Two epochs of verdicts: KTO pairs them anew in each."""
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dpo": (DPO, {"preference": {"sigmoid": preference_losses.sigmoid, "sft": preference_losses.sft}}),
    "aot": (DPO, {"preference": preference_losses.aot}),  # over the step
    "kto": (KTO, {}),
    "bco": (BCO, {"prompt_weights": DensityRatio(sample_rows=30)}),
}


def run(name: str, folder: Path, devices: int) -> None:
    """Leaves the trained weights, and what training and validation logged, in `NAME.pt`; what was computed before the
    training is in the folder `NAME`."""
    method, more = RUNS[name]
    module = method("tiny", optimizer=ByPath("torch.optim.SGD", lr=0.1), scheduler=Constant(),
                    sampling=Sampling(max_new_tokens=6), precompute_reference=True, **more)  # fmt: skip
    data = PreferenceDataModule(task=AdditionPairs(max_operand=4, val_rows=6), batch_size=8, val_batch_size=4)
    trainer = dist_equal.trainer(
        folder / name, devices, max_steps=STEPS, accumulate_grad_batches=2, limit_val_batches=1.0
    )
    dist_equal.train_and_leave(module, data, trainer, folder / f"{name}.pt", cut=CUT.get(name, []))


CUT = {"kto": ["val/kl", "val/loss"], "aot": ["val/loss"]}
"""As in `dist_offline.py`: metrics of a validation batch, of which two processes have other ones."""


def main(folder: Path) -> None:
    for name in RUNS:
        run(name, folder, 2)
