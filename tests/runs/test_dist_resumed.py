"""Two processes that stop in the middle of a rollout and go on end with the bits of the whole run."""

from __future__ import annotations

from pathlib import Path

import dist_equal
import pytest
import torch
from dist_equal import assert_same_metrics, left
from lightning.pytorch.callbacks import ModelCheckpoint
from runs_helpers import assert_same

from lit_rl.algorithms.optim.strategies import FSDP2Strategy

pytestmark = [pytest.mark.dist, pytest.mark.all]

PASSES = ["algo.iterations=2", "algo.minibatches=2"]
"""Four optimizer steps a rollout: steps 4 and 8 end one."""

STATEFUL = [
    *PASSES,
    "algo.beta=0.1",
    "reference=ema",
    "algo/kl_control=adaptive",
    "algo.kl_control.target=1e-3",
    "algo.kl_control.horizon=64",
    "algo/entropy=adaptive",
    "algo.entropy.target=10",
    "algo/reward_norm=running",
    "algo/groups=dynamic",
    "algo.groups.max_draws=1",
    "algo/replay=buffer",
    "optimizer.lr=1e-3",
]
PPO = ["algo=ppo", *PASSES, "algo.group_size=2", "algo.critic_lr=1e-3", "data.prompts_per_rollout=8"]

SMALL = ["data.task.max_operand=5", "data.task.val_rows=4", "algo.group_size=4"]
SHAPES = {
    "ddp": [*SMALL, *STATEFUL, "data.prompts_per_rollout=16"],
    "fsdp": [*SMALL, *PPO, "algo/kl_control=adaptive"],
    "shared": [*SMALL, *PASSES, "algo/groups=dynamic", "algo.groups.max_draws=2", "data.prompts_per_rollout=6"],
}
STEPS, STOP = 8, 6


def run(name: str, folder: Path, ckpt_path: Path | None = None) -> None:
    """Train to the last step, with a checkpoint after each, `step=N.ckpt`; `logged.pt` has what callbacks saw last."""
    module, data = dist_equal.parts(*SHAPES[name])
    keeps = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False)
    trainer = dist_equal.trainer(
        folder, 2, strategy=FSDP2Strategy() if name == "fsdp" else "ddp", max_steps=STEPS, enable_checkpointing=True,
        accumulate_grad_batches=2 if name == "ddp" else 1, callbacks=[keeps],
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    if trainer.is_global_zero:
        torch.save(dist_equal.logged(trainer), folder / "logged.pt")
    trainer.strategy.barrier()


def main(folder: Path) -> None:
    for name in SHAPES:
        run(name, folder / name / "whole")
        run(name, folder / name / "again", folder / name / "whole" / f"step={STOP}.ckpt")


def saved(folder: Path, step: int) -> dict:
    return torch.load(folder / f"step={step}.ckpt", weights_only=True)


@pytest.mark.parametrize("name", SHAPES)
def test_two_processes_go_on_from_the_middle_of_a_rollout(two_ranks: Path, name: str) -> None:
    """Every rank has its own buffer, its own half-used rollout and its own noise."""
    whole, again = (two_ranks / "resumed" / name / which for which in ("whole", "again"))
    first, second = saved(whole, STEPS), saved(again, STEPS)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "lit_rl"):
        assert_same(first[part], second[part], part)
    assert_same(first.get("reference"), second.get("reference"), "reference")
    assert_same_metrics(left(whole, "logged"), left(again, "logged"))
    assert not (again / f"step={STOP - 1}.ckpt").exists(), "it began anew"
    mine, others = (rank["module"]["rollout"]["completions"]["response_ids"] for rank in saved(whole, STOP)["lit_rl"])
    assert mine.shape != others.shape or not torch.equal(mine, others)
