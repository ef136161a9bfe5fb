"""Weights that differ from row to row reach an advantage that weighs the functions itself."""

from __future__ import annotations

from typing import Any

import pytest
from small_rollouts import batch, completions

from lit_rl.algorithms import GRPO
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.ops.advantages import normalize_then_sum
from lit_rl.rewards import RewardRecipes, Rewards

TEXTS = ["no", "yes", "no", "yes"]
"""Two completions of each of two prompts."""


def right(completions: list[str]) -> list[float]:
    return [float(text == "yes") for text in completions]


def short(completions: list[str]) -> list[float]:
    return [-float(len(text)) for text in completions]


def advantages(reward: Rewards, **columns: Any) -> list[float]:
    module = GRPO("tiny", reward, group_size=2, advantage=normalize_then_sum)
    scores = reward.score(["p"] * 4, TEXTS, columns)
    rollout, _ = module.advantages(Scored(batch([0, 1]), completions([1] * 4, 2), scores), None, None)
    return rollout.advantages.tolist()


def test_each_recipe_weighs_its_functions_after_they_are_normalised():
    """One recipe asks for right answers, the other rather for short ones: the same two completions, the other order."""
    recipes = {"right": {"right": 3.0, "short": 1.0}, "short": {"right": 1.0, "short": 3.0}}
    reward = RewardRecipes({"right": right, "short": short}, recipes)
    size = 0.75**0.5
    sources = ["right", "right", "short", "short"]
    assert advantages(reward, source=sources) == pytest.approx([-size, size, size, -size], abs=1e-3)
