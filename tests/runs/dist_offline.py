"""Short runs of offline methods, in one process or in two: `python dist_offline.py FOLDER` runs all of them in two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dist_equal
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from lit_rl.algorithms.strategies import FSDP2Strategy
from lit_rl.cli import schemas
from lit_rl.cli.build import build, plain
from lit_rl.models.sharding import full_state_dict

SHAPES: dict[str, list[str]] = {
    "sft": ["algo=sft"],
    "sft-packed": ["algo=sft", "data.packing=best_fit", "data.max_length=24"],
    "dpo": ["algo=dpo"],
    "mpo": ["algo=dpo", "algo/preference=[sigmoid,bco_pair,sft]", "algo.preference_weights={sigmoid:0.8,bco_pair:0.2}"],
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
    "run_dir=run",
]
"""Plain SGD: the change of the weights is the gradient."""


def parts(name: str) -> tuple[Any, Any]:
    schemas.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("lit_rl.conf", version_base="1.3"):
        tree = plain(compose("config", [*COMMON, *SHAPES[name]]))
    return build(tree["algo"]), build(tree["data"])


def run(name: str, folder: Path, devices: int, accumulate: int = 1, **more: Any) -> None:
    """Train, validate, and leave `name.pt` there: the weights and what was logged."""
    module, data = parts(name)
    module.sampling = type(module.sampling)(max_new_tokens=2)
    trainer = dist_equal.trainer(folder, devices, max_steps=STEPS, accumulate_grad_batches=accumulate, **more)
    trainer.fit(module, datamodule=data)
    metrics = dist_equal.logged(trainer)
    trainer.limit_val_batches = 1.0
    trainer.validate(module, datamodule=data, verbose=False)
    metrics |= dist_equal.logged(trainer)
    weights = full_state_dict(module.policy)
    if trainer.is_global_zero:
        cut = CUT.get(name, [])
        torch.save({"weights": weights, "metrics": metrics, "cut": cut}, folder / f"{name}.pt")
    trainer.strategy.barrier()


def main(folder: Path) -> None:
    for name in SHAPES:
        run(name, folder, 2)
    (folder / "fsdp").mkdir(exist_ok=True)
    for name in ("dpo", "aot"):
        run(name, folder / "fsdp", 2, accumulate=2, strategy=FSDP2Strategy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
