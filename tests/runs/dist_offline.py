"""Short runs of offline methods, in one process or in two (`dist_jobs.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dist_equal

from lit_rl.algorithms.loop.generating import GeneratingModule
from lit_rl.algorithms.optim.strategies import FSDP2Strategy

MPO = ["algo=dpo", "algo/preference=[sigmoid,bco_pair,sft]", "algo.preference_weights={sigmoid:0.8,bco_pair:0.2}"]
SHAPES: dict[str, list[str]] = {
    "sft": ["algo=sft"],
    "sft-packed": ["algo=sft", "data.packing=best_fit", "data.max_length=24"],
    "dpo": ["algo=dpo"],
    "mpo": MPO,
    "aot": ["algo=dpo", "algo/preference=[aot]"],
    "aot-unpaired": ["algo=dpo", "algo/preference=[aot_unpaired]"],
    "kto": ["algo=kto"],
    "bco": ["algo=bco"],
    "cpo": ["algo=cpo"],
    "simpo": ["algo=simpo"],
    "orpo": ["algo=orpo"],
    "reward-model": ["algo=reward_model"],
    "process-reward-model": ["algo=process_reward_model", "data.task.max_operand=30"],  # of one step or two
}
UNEVEN = ["data.task.val_rows=5", "data.val_batch_size=2"]
"""Validation batches that the ranks do not share evenly: one has a row less, and yet has to gather every layer."""
OF_SHARDS: dict[str, list[str]] = {
    "dpo-recomputed": ["algo=dpo", "model.gradient_checkpointing=true", *UNEVEN],
    "sft-lora": ["algo=sft", "model.lora.r=4", *UNEVEN],
    "mpo-lora": [*MPO, "model.lora.r=4", "reference=adapter_base"],
}
"""What is new where weights are spread: layers gathered again in the backward pass, frozen ones, and a reference that
is the policy without its adapters. Their validation is uneven."""
WHOLE = [name for name in SHAPES if name not in ("sft-packed", "simpo")]
"""Run under DDP: packed rows are run under FSDP2, and SimPO is CPO with another formula."""
SHARDED = [
    *("aot", "kto", "bco", "mpo", "cpo", "simpo", "orpo"),
    *("sft-packed", "reward-model", "process-reward-model", *OF_SHARDS),
]
"""Run under FSDP2 too: SFT and DPO are among `OF_SHARDS`, and unpaired AOT differs from AOT in the formula alone."""
CUT = {"kto": ["val/kl", "val/loss"], "aot": ["val/loss"], "aot-unpaired": ["val/loss"]}
"""Validation metrics that belong to a batch: KTO's baseline is that of the batch at hand, AOT sorts over it."""
STEPS = 3
COMMON = [
    "data.task.max_operand=9",
    "data.task.val_rows=6",
    "data.batch_size=8",
    "optimizer=by_path",
    "optimizer.path=torch.optim.SGD",
    "optimizer.lr=0.05",
    "scheduler=constant",
    "scheduler.warmup_steps=0",
]
"""Plain SGD: the change of the weights is the gradient."""


def run(name: str, folder: Path, devices: int, accumulate: int = 1, **more: Any) -> None:
    """Train, validate, and leave `name.pt` there."""
    module, data = dist_equal.parts(*COMMON, *(SHAPES | OF_SHARDS)[name])
    if isinstance(module, GeneratingModule):
        module.sampling = type(module.sampling)(max_new_tokens=2)
    trainer = dist_equal.trainer(folder, devices, max_steps=STEPS, accumulate_grad_batches=accumulate, **more)
    dist_equal.train_and_leave(module, data, trainer, folder / f"{name}.pt", cut=CUT.get(name, []))


def main(folder: Path) -> None:
    for name in WHOLE:
        run(name, folder, 2)
    (folder / "fsdp").mkdir(exist_ok=True)
    for name in SHARDED:
        run(name, folder / "fsdp", 2, accumulate=2, strategy=FSDP2Strategy())
