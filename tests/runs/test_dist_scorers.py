"""A reward model that scores is spread under FSDP2: each rank holds its part, and says what the whole model says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dist_scorers
import pytest
from dist_equal import assert_equal_runs, left

from lit_rl.rewards.combinations import RewardRecipes
from lit_rl.rewards.model_rewards import RewardModel
from lit_rl.rewards.weighted_rewards import Rewards

pytestmark = [pytest.mark.dist, pytest.mark.all]


@pytest.fixture(scope="module")
def two(two_ranks: Path) -> Any:
    return left(two_ranks / "scorers", "grpo")


def test_two_processes_learn_as_one_with_a_whole_reward_model(two: Any, tmp_path: Path) -> None:
    dist_scorers.run("grpo", tmp_path, 1)
    assert_equal_runs(left(tmp_path, "grpo"), two, share=2e-4, beyond=2e-6, moved=1e-3)


def test_ranks_with_other_numbers_of_batches_get_the_scores_of_the_whole_model(two: Any) -> None:
    assert [len(each["scores"]) for each in two["ranks"]] == list(dist_scorers.ROWS)
    for each in two["ranks"]:
        assert each["scores"] == pytest.approx(each["whole"], rel=1e-6)  # weights lie elsewhere: other last bits


def test_each_rank_holds_half_of_the_weights(two: Any) -> None:
    first, second = two["ranks"]
    assert first["bytes"] + second["bytes"] == first["whole_bytes"]
    assert max(first["bytes"], second["bytes"]) < 0.51 * first["whole_bytes"]


@pytest.mark.parametrize("settings", [{"cache": 4}, {"on_error": 0.0}])
def test_it_stays_whole_where_a_rank_may_call_it_by_itself(settings: dict[str, Any], tmp_path: Path) -> None:
    mesh: Any = object()  # nobody is asked
    scorer = RewardModel(dist_scorers.scorer_in(tmp_path))
    recipes = RewardRecipes({"scorer": scorer}, {"all": {"scorer": 1.0}}, default="all")
    for rewards in (Rewards(scorer, **settings), recipes):
        rewards.load(mesh)
        assert not rewards.waits_for_ranks


def test_no_rank_waits_for_one_that_cannot_score(two: Any) -> None:
    first, second = (each["told"] for each in two["ranks"])
    assert "row 0 has" in second and "max_length=8" in second
    assert "another rank" in first
