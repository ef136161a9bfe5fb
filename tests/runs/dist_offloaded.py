"""FSDP2 with shards on the host, and without, in two processes (`dist_jobs.py`); clipped, and gone on with."""

from __future__ import annotations

from pathlib import Path

import dist_equal
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from lit_rl.algorithms.optim.strategies import FSDP2Strategy

SMALL = ["data.task.max_operand=5", "data.task.val_rows=2", "optimizer.lr=1e-3"]
SHAPES = {
    "grpo": [
        *SMALL, "algo.beta=0.1", "reference=ema", "algo.group_size=4", "data.prompts_per_rollout=4",
        "algo.minibatches=2", "sampling.max_new_tokens=4",
    ],
    "sft": [*SMALL, "algo=sft", "data.batch_size=8"],
}  # fmt: skip
STEPS, STOP, CLIP = 4, 3, 0.05


def run(name: str, folder: Path, *, offload: bool, ckpt_path: Path | None = None) -> None:
    """Train with AdamW; leave `name.pt`, and `name-step=N.ckpt` after each step."""
    module, data = dist_equal.parts(*SHAPES[name])
    keeps = ModelCheckpoint(
        folder, f"{name}-{{step}}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False
    )
    trainer = dist_equal.trainer(
        folder, 2, strategy=FSDP2Strategy(cpu_offload=offload), max_steps=STEPS, gradient_clip_val=CLIP,
        enable_checkpointing=True, callbacks=[keeps], accumulate_grad_batches=1 if name == "grpo" else 2,
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    groups = [part._get_fsdp_state()._fsdp_param_group for part in module.modules() if isinstance(part, FSDPModule)]
    on_host = [isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups if group]
    dist_equal.leave(module, trainer, folder / f"{name}.pt", on_host=on_host, norm=float(module.grad_norm))


def main(folder: Path) -> None:
    for name in SHAPES:
        run(name, folder / "device", offload=False)
        run(name, folder / "host", offload=True)
        run(name, folder / "again", offload=True, ckpt_path=folder / "host" / f"{name}-step={STOP}.ckpt")
