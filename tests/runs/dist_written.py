"""Short runs of methods that write what they learn from, in one process or in two (`dist_jobs.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dist_equal

from lit_rl.algorithms.optim.strategies import FSDP2Strategy

ONE_LAYER = "model.init_kwargs={num_hidden_layers: 1, layer_types: [full_attention]}"
REWARDS = Path(__file__).with_name("dist_rewards.py")
ONLINE = ["reward=function", f"reward.fn={REWARDS}:varied", "data.prompts_per_rollout=8", "optimizer.lr=0.01"]
GKD = ["algo=gkd", ONE_LAYER, "algo.teacher.name=tiny", "data.batch_size=8", "optimizer.lr=0.1"]
VERDICTS = ["judge=function", f"judge.fn={REWARDS}:with_ties_and_failures"]

SHAPES: dict[str, list[str]] = {
    "online-dpo": ["algo=online_dpo", *ONLINE, "algo.missing_eos_penalty=1.5"],
    "online-dpo-of-four": ["algo=online_dpo", *ONLINE, *VERDICTS, "algo.group_size=4", "algo/preference=[sigmoid,sft]",
                           "algo.iterations=2", "seed=3"],
    "online-ipo": ["algo=online_ipo", *ONLINE, "optimizer.lr=0.0003"],
    "iterative-dpo": ["algo=iterative_dpo", *ONLINE, "reference.every=2"],
    "xpo": ["algo=xpo", *ONLINE, *VERDICTS, "algo.alpha=0.1"],
    "nash-md": ["algo=nash_md", *ONLINE, *VERDICTS],
    "raft": ["algo=raft", *ONLINE, "algo.group_size=4"],
    "gkd-data": [*GKD, "algo.on_policy_fraction=0"],
    "gkd-student": [*GKD, "algo.on_policy_fraction=1", "algo.beta=0.9"],
    "gkd-mixed": [*GKD, "algo.on_policy_fraction=0.5", "algo.teacher_completions=true"],
}  # fmt: skip
SHARDED = ["online-dpo-of-four", "nash-md", "gkd-mixed"]
STEPS = 4
COMMON = [
    "data.task.max_operand=9",
    "data.task.val_rows=6",
    "sampling.max_new_tokens=4",
    "optimizer=by_path",
    "optimizer.path=torch.optim.SGD",
    "scheduler=constant",
    "scheduler.warmup_steps=0",
]
"""Plain SGD: the change of the weights is the gradient."""


def run(name: str, folder: Path, devices: int, accumulate: int = 1, **more: Any) -> None:
    """Train, validate, and leave `name.pt` there."""
    module, data = dist_equal.parts(*COMMON, *SHAPES[name])
    trainer = dist_equal.trainer(folder, devices, max_steps=STEPS, accumulate_grad_batches=accumulate, **more)
    dist_equal.train_and_leave(module, data, trainer, folder / f"{name}.pt")


def main(folder: Path) -> None:
    for name in SHAPES:
        run(name, folder, 2, accumulate=2)
    (folder / "fsdp").mkdir(exist_ok=True)
    for name in SHARDED:
        run(name, folder / "fsdp", 2, strategy=FSDP2Strategy())
