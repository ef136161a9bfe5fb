"""Every `algo=` preset that learns from rewards raises that of the shipped policy within a few dozen rollouts of sums.

`make test` trains three, `make test-all` one of each path through the code, `make test-exhaustive` the others.
The curves in docs/algorithms are of the sums themselves, which take more rollouts than a test has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from composed_configs import tree_of
from small_rollouts import trainer as quiet_trainer
from tiers import all_but_exhaustive, quick

import lit_rl.algorithms
from lit_rl.algorithms.loop.on_policy import OnPolicyModule
from lit_rl.cli.build import build
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.rewards import Rewards as RewardFunctions

ALGO = Path(lit_rl.__file__).parents[1] / "conf" / "algo"


def schema_of(preset: str) -> str:
    """Name of the schema that a preset's file takes up, or that of the preset which it begins with."""
    first, *_ = yaml.safe_load((ALGO / f"{preset}.yaml").read_text())["defaults"]
    return first.removeprefix("/schemas/").partition("@")[0] if first.startswith("/schemas/") else schema_of(first)


TAUGHT = {"opd", "sdft", "sdpo"}
"""Presets that learn from a teacher, whatever the reward: `test_teachers` trains these."""
PRESETS = sorted(
    path.stem
    for path in ALGO.glob("*.yaml")
    if issubclass(getattr(lit_rl.algorithms, schema_of(path.stem)), OnPolicyModule) and path.stem not in TAUGHT
)
ROLLOUTS, COMPLETIONS = 32, 64
PASSES = {"ppo": 2}
"""Passes over a rollout, where the preset's own would take long."""

FIRST = {"grpo", "ppo", "online_dpo"}
"""One of each family: `make test` trains these."""

PATHS = FIRST | {
    "raft",  # the best of each group alone
    "dapo",  # groups drawn anew
    "xpo",  # an opponent that writes too, and a term of its completions
}
"""One of each path through the code: `make test-all` trains these. The others differ by a function that has laws."""


def resolved(name: str) -> dict[str, Any]:
    """The preset's config, with as many completions a rollout as any other."""
    group = tree_of(f"algo={name}")["algo"]["group_size"]
    prompts = f"data.prompts_per_rollout={COMPLETIONS // group}"
    passes = [f"algo.iterations={PASSES[name]}"] if name in PASSES else []
    return tree_of(f"algo={name}", prompts, "optimizer.lr=3e-4", "scheduler=constant", *passes)


class Rewards(L.Callback):
    """The mean reward of every rollout."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        steps = trainer.lightning_module.minibatches * trainer.lightning_module.iterations
        if trainer.global_step == steps * (len(self.seen) + 1):
            self.seen.append(float(trainer.callback_metrics["train/reward"]))


def seven(completions: list[str], **_: Any) -> list[float]:
    """1 for a last digit of 7. All sums pull the same way, so that a few dozen rollouts show it above their noise."""
    return [float(completion.endswith("7")) for completion in completions]


@pytest.mark.parametrize("name", quick(all_but_exhaustive(PRESETS, PATHS), FIRST))
def test_the_reward_rises(name: str, tmp_path: Path) -> None:
    tree = resolved(name)
    rows = Addition(max_operand=12, val_rows=0).train()
    data = RolloutDataModule(rows=rows, prompts_per_rollout=tree["data"]["prompts_per_rollout"])
    module, rewards = build(tree["algo"]), Rewards()
    module.reward_functions = RewardFunctions(seven)
    trainer = quiet_trainer(
        tmp_path,
        max_steps=ROLLOUTS * module.minibatches * module.iterations,
        gradient_clip_val=1.0,
        callbacks=[rewards],
    )
    trainer.fit(module, datamodule=data)
    seen, quarter = rewards.seen, ROLLOUTS // 4
    assert len(seen) == ROLLOUTS
    first, last = sum(seen[:quarter]) / quarter, sum(seen[-quarter:]) / quarter
    print(f"{name}: {first:.3f} -> {last:.3f}")
    assert last > first + 0.25, seen
