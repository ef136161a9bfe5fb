"""How much probability top-k, top-p and min-p left to draw from is logged where one of them is in force."""

from __future__ import annotations

import math
from typing import Any

import pytest
from small_rollouts import EachBatch, trainer

from lit_rl.algorithms import GRPO
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.rewards import exact_match


def logged(tmp_path: Any, **sampling: Any) -> tuple[dict[str, float], Any]:
    """The metrics of one rollout, and its completions."""
    module = GRPO("tiny", exact_match, group_size=4, sampling=Sampling(max_new_tokens=6, **sampling))
    drawn = EachBatch(lambda m: m.scored.completions)
    data = RolloutDataModule(task=Addition(max_operand=30, val_rows=4), prompts_per_rollout=4)
    run = trainer(tmp_path, max_steps=1, callbacks=[drawn])
    run.fit(module, datamodule=data)
    return {name: float(value) for name, value in run.callback_metrics.items()}, drawn.seen[0]


def test_it_is_the_mean_over_sampled_tokens(tmp_path):
    metrics, drawn = logged(tmp_path, top_p=0.5, temperature=2.0)
    masses = [
        math.exp(mass)
        for masses, mask in zip(drawn.kept_logmass.tolist(), drawn.response_mask.tolist())
        for mass, sampled in zip(masses, mask)
        if sampled
    ]
    assert metrics["train/sampling/kept_mass"] == pytest.approx(sum(masses) / len(masses), rel=1e-5)
    assert 0.5 <= min(masses) < metrics["train/sampling/kept_mass"] < 1


def test_without_a_truncation_there_is_none(tmp_path):
    metrics, _ = logged(tmp_path)
    assert "train/reward" in metrics and "train/sampling/kept_mass" not in metrics
