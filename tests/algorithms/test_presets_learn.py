"""Every `algo=` preset raises the reward of the shipped policy on a few dozen sums."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

import lit_rl
from lit_rl.cli import schemas
from lit_rl.cli.build import build, plain
from lit_rl.data.datamodule import RolloutDataModule

PRESETS = sorted(path.stem for path in (Path(lit_rl.__file__).parents[1] / "conf" / "algo").glob("*.yaml"))
ROLLOUTS, COMPLETIONS = 60, 64
PASSES = {"ppo": 2}
"""Passes over a rollout, where the preset's own would take long."""


@pytest.fixture
def preset(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """The preset's name and resolved config, with as many completions a rollout as any other."""
    name = request.param
    schemas.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("lit_rl.conf", version_base="1.3"):
        group = compose("config", [f"algo={name}"]).algo.group_size
        changes = [
            f"algo={name}",
            f"data.prompts_per_rollout={COMPLETIONS // group}",
            "optimizer.lr=3e-4",
            "scheduler=constant",
        ]
        changes += [f"algo.iterations={PASSES[name]}"] if name in PASSES else []
        yield name, plain(compose("config", changes))
    GlobalHydra.instance().clear()


class Rewards(L.Callback):
    """The mean reward of every rollout."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        steps = trainer.lightning_module.minibatches * trainer.lightning_module.iterations
        if trainer.global_step == steps * (len(self.seen) + 1):
            self.seen.append(float(trainer.callback_metrics["train/reward"]))


@pytest.mark.parametrize("preset", PRESETS, indirect=True)
def test_the_reward_rises(preset: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    _, tree = preset
    prompts = tree["data"]["prompts_per_rollout"]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    held_out = 0 if prompts == len(rows) else 0.1
    data = RolloutDataModule(rows=rows, prompts_per_rollout=prompts, val_fraction=held_out)
    module, rewards = build(tree["algo"]), Rewards()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=ROLLOUTS * module.minibatches * module.iterations,
        gradient_clip_val=1.0,
        default_root_dir=tmp_path,
        callbacks=[rewards],
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    seen, quarter = rewards.seen, ROLLOUTS // 4
    assert len(seen) == ROLLOUTS
    first, last = sum(seen[:quarter]) / quarter, sum(seen[-quarter:]) / quarter
    print(f"{preset[0]}: {first:.3f} -> {last:.3f}")
    assert last > first + 0.05, seen
