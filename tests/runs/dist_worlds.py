"""Runs that are gone on with by another number of processes, in one process or in two (`dist_jobs.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dist_equal
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rl.algorithms import BCO
from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.callbacks.exported_weights import AveragedWeights, BEMAWeights, EMAWeights
from lit_rl.models.sharding import full_state_dict

MOMENTUM = [
    *("optimizer=by_path", "optimizer.path=torch.optim.SGD", "optimizer.kwargs.momentum=0.9", "optimizer.lr=0.05"),
    *("scheduler=cosine", "scheduler.warmup_steps=0"),
]
"""No Adam: it makes steps of one size of gradients that are rounding errors."""

GRPO = [
    *("data.task.max_operand=5", "data.task.val_rows=4", "data.prompts_per_rollout=16", "algo.group_size=4"),
    *("algo.iterations=2", "algo.beta=0.1", "reference=ema", "algo/reward_norm=running", "algo/entropy=adaptive"),
    *("algo/kl_control=adaptive", "algo.kl_control.target=1e-3", "algo.kl_control.horizon=64"),
]
"""Two optimizer steps a rollout, two rollouts an epoch."""

SHAPES = {
    "grpo": [*MOMENTUM, *GRPO],
    "ppo": [*MOMENTUM, *GRPO[:5], "algo=ppo", "algo.group_size=2", "algo.critic_lr=0.05"],
    "sft": [*MOMENTUM, "algo=sft", "data.task.max_operand=9", "data.task.val_rows=6", "data.batch_size=8"],
    "bco": [*MOMENTUM, "algo=bco", "data.task.max_operand=9", "data.task.val_rows=6", "data.batch_size=8"],
}
STEPS, WHOLE, HALF = 6, 2, 3
"""Optimizer steps of a run; a step with which a rollout of `GRPO` ends, and one in the middle of the
epoch's last."""


class Seen(L.Callback):
    """Weights, their averages and the optimizer as the training begins, and the rows of each rollout or step over all
    ranks."""

    def __init__(self, averages: Sequence[AveragedWeights]) -> None:
        self.averages = averages
        self.begun: dict[str, Any] = {}
        self.rows: list[tuple[int, list[int]]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        weights = {name: tensor.clone() for name, tensor in full_state_dict(pl_module.policy).items()}
        kept: dict[str, Any] = trainer.strategy.optimizer_state(trainer.optimizers[0])
        momentum = {number: of["momentum_buffer"].clone() for number, of in kept.get("state", {}).items()}
        self.begun = {"weights": weights, "momentum": momentum}
        self.begun["averages"] = {
            average.state_key: {kind: average._whole(kind) for kind in average.kinds} for average in self.averages
        }
        self.begun["shift"] = pl_module.shift.state() if isinstance(pl_module, BCO) else {}

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        number = getattr(batch, "rollout", None)
        of_all = [row for rows in pl_module.ranks.objects(list(batch.rows)) for row in rows]
        if number is None:
            self.rows.append((batch.step, sorted(of_all)))
        elif batch.slot == 0:
            self.rows.append((number, of_all))


def run(
    name: str, folder: Path, devices: int, *, start: Path | None = None, label: str = "", sharded: bool = False
) -> None:
    """Train to the last step, on from a checkpoint if one is given, and leave `label.pt`; and `step=N.ckpt` of all
    steps in the folder `label`. One process cuts a step in two, as two processes share it."""
    module, data = dist_equal.parts(*SHAPES[name])
    averages = [EMAWeights(decay=0.5), BEMAWeights(every=1)]
    seen, label = Seen(averages), label or name
    keeps = ModelCheckpoint(folder / label, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = dist_equal.trainer(
        folder, devices, max_steps=STEPS, callbacks=[*averages, seen, keeps],
        accumulate_grad_batches=1 if devices > 1 else 2,
        log_every_n_steps=HALF if name in ("sft", "bco") else 1, enable_checkpointing=True,
        **({"strategy": FSDP2Strategy()} if sharded else {}),
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=True)
    left = {"metrics": dist_equal.logged(trainer), "begun": seen.begun, "rows": seen.rows}
    left |= {"weights": full_state_dict(module.policy), "steps": trainer.global_step, "epoch": trainer.current_epoch}
    if trainer.is_global_zero:
        torch.save(left, folder / f"{label}.pt")
    trainer.strategy.barrier()


def alone(folder: Path) -> None:
    """What one process leaves for two to go on with: before they begin."""
    for name in ("grpo", "sft", "bco"):
        run(name, folder / "one", 1)


def main(folder: Path) -> None:
    (folder / "two").mkdir(exist_ok=True)
    run("grpo", folder / "two", 2)
    run("sft", folder / "two", 2)
    run("ppo", folder / "two", 2, sharded=True)
    for step in (WHOLE, HALF):
        run("grpo", folder / "two", 2, start=folder / "one" / "grpo" / f"step={step}.ckpt", label=f"grpo-from-{step}")
    for name in ("sft", "bco"):
        start = folder / "one" / name / f"step={HALF}.ckpt"
        run(name, folder / "two", 2, start=start, label=f"{name}-from-one")
    start = folder / "one" / "grpo" / f"step={WHOLE}.ckpt"
    run("grpo", folder / "two", 2, start=start, label="grpo-sharded", sharded=True)


def four(folder: Path) -> None:
    """Four processes go on where `start.ckpt` beside the folder stands."""
    run("grpo", folder, 4, start=folder.parent / "start.ckpt")
