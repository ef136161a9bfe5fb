"""FSDP2 with weights, gradients and optimizer in the host's memory: the bits of FSDP2 without, over two processes."""

from __future__ import annotations

from pathlib import Path

import dist_equal
import pytest
import torch
from dist_equal import left
from lightning.pytorch.callbacks import ModelCheckpoint
from runs_helpers import assert_same
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from lit_rl.algorithms.optim.strategies import FSDP2Strategy

pytestmark = [pytest.mark.dist, pytest.mark.all]

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


def saved(folder: Path, name: str) -> dict:
    return torch.load(folder / f"{name}-step={STEPS}.ckpt", weights_only=True)


@pytest.mark.parametrize("name", SHAPES)
def test_shards_on_the_host_learn_and_go_on_as_those_on_the_device(two, name):
    device, host, again = (left(two / which, name) for which in ("device", "host", "again"))
    assert all(host["on_host"]) and not any(device["on_host"]) and len(host["on_host"]) > 2
    assert device["norm"] > CLIP, "nothing was clipped"
    for other in (host, again):
        assert_same(device["weights"], other["weights"], "weights")
        assert other["norm"] == device["norm"]
    first = saved(two / "device", name)
    for which in ("host", "again"):
        for part in ("state_dict", "optimizer_states"):
            assert_same(first[part], saved(two / which, name)[part], part)
