"""Iterative DPO: rounds of online DPO, each against the policy that it began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from small_rollouts import EachBatch, trainer

from lit_rl.algorithms import OnlineDPO
from lit_rl.cli import schemas
from lit_rl.cli.build import build, plain
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.models.references import Mixing


@pytest.fixture
def module() -> Any:
    schemas.register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_module("lit_rl.conf", version_base="1.3"):
        changes = ["reference.every=2", "optimizer.lr=3e-3", "scheduler=constant", "scheduler.warmup_steps=0"]
        tree = plain(compose("config", ["algo=iterative_dpo", *changes]))
    GlobalHydra.instance().clear()
    return build(tree["algo"])


def test_the_reference_is_the_policy_of_the_rounds_start(module: Any, tmp_path: Path):
    assert type(module) is OnlineDPO and type(module.reference) is Mixing
    assert (module.reference.alpha, module.reference.every) == (1.0, 2)
    kl = EachBatch(lambda m: float(m.trainer.callback_metrics["train/objective/kl"]))
    data = RolloutDataModule(rows=Addition(20, 0).train(), prompts_per_rollout=16)
    trainer(tmp_path, max_steps=6, callbacks=[kl]).fit(module, datamodule=data)
    first_of_round, second = kl.seen[0::2], kl.seen[1::2]
    assert first_of_round == pytest.approx([0.0] * 3, abs=1e-5)
    assert all(value > 1e-3 for value in second)
