"""Short runs over two pretended devices: `python two_ranks.py FOLDER` starts the two processes once for all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "runs"))

import dist_equal
import test_dist_scorers
import torch
from dist_equal import CLIP, SGD
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from test_dist_mesh import SHAPES

from lit_rl.algorithms.optim.strategies import FSDP2Strategy, FSDPTPStrategy
from lit_rl.callbacks import GracefulStop

STEPS, STOP = 4, 3
"""GRPO takes two steps a rollout: it stops in the middle of one."""
# cpu_offload needs a process group of another kind, and a process has one: a command of its own runs it.
STRATEGIES: dict[str, Any] = {
    "ddp": lambda: DDPStrategy(gradient_as_bucket_view=True),
    "fsdp": FSDP2Strategy,
    "tp": lambda: FSDPTPStrategy(tp_size=2),
}
GAME = [
    "data=repeated", "data.task.prompt='0..9='", "data.task.train_rows=32", "data.task.val_rows=4",
    "data.prompts_per_rollout=4", "env=environment", "env.path=lit_rl.environments.games:GuessNumber",
    "env.max_turns=3", "env.max_tokens=24", "env.max_observation_tokens=8", "sampling.max_new_tokens=4",
    "reward=environment", "algo=ppo", "algo.group_size=4", "algo.minibatches=2", "algo.critic_lr=0.3",
    "algo.reward_beta=0.05", "algo/selection=top_entropy",
]  # fmt: skip
METHODS = {name: SHAPES[name] for name in ("grpo", "dpo")} | {
    "grpo_ema": ["reference=ema" if word.startswith("reference=") else word for word in SHAPES["grpo"]],
    "ppo": [*GAME, *SGD],
}
RUNS = [("ddp", "grpo"), ("ddp", "dpo"), ("fsdp", "grpo_ema"), ("fsdp", "ppo"), ("tp", "grpo")]


def run(name: str, method: str, folder: Path, *, resume: bool = False, **settings: Any) -> None:
    """Train with clipped gradients and validate; leave `name.pt` and a checkpoint after each step.

    Args:
        name: Of what is left.
        method: Of `METHODS`.
        folder: Where it is left.
        resume: Go on from the checkpoint of step `STOP`, and leave `name-again.pt`.
        settings: Of the Trainer: `devices`, and more where they are not one CPU.
    """
    module, data = dist_equal.parts(*METHODS[method])
    keeps = ModelCheckpoint(
        folder / name, "{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False
    )
    trainer = dist_equal.trainer(
        folder,
        max_steps=STEPS,
        gradient_clip_val=CLIP,
        enable_checkpointing=True,
        callbacks=[keeps, GracefulStop()],
        **settings,
    )
    begin = folder / name / f"step={STOP}.ckpt" if resume else None
    trainer.fit(module, datamodule=data, ckpt_path=begin, weights_only=True)
    metrics = dist_equal.logged(trainer)
    trainer.limit_val_batches = 1.0
    trainer.validate(module, datamodule=data, verbose=False)
    devices = sorted({str(each.device.type) for each in module.policy.parameters()})
    left = folder / f"{name}{'-again' * resume}.pt"
    dist_equal.leave(module, trainer, left, metrics=metrics | dist_equal.logged(trainer), devices=devices)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for strategy, method in RUNS:
        for resume in (False, True) if method.startswith("grpo") else (False,):
            made = STRATEGIES[strategy]()
            run(
                f"{strategy}-{method}", method, Path(sys.argv[1]), resume=resume, devices=2, accelerator="cuda",
                strategy=made,
            )  # fmt: skip
    test_dist_scorers.run("scorer", Path(sys.argv[1]), devices=2, accelerator="cuda", strategy=FSDP2Strategy())
