"""A reward model that scores is spread under FSDP2: each rank holds its part, and says what the whole model says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dist_equal
import pytest
from dist_equal import CLIP, GRPO, assert_equal_runs, left, scorer_in

from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.core.errors import RewardError
from lit_rl.rewards.combinations import RewardRecipes
from lit_rl.rewards.model_rewards import RewardModel
from lit_rl.rewards.weighted_rewards import Rewards

pytestmark = [pytest.mark.dist, pytest.mark.all]

STEPS = 4
ROWS = (5, 1)
"""Texts that each rank scores by itself, two in a batch: three calls of the model, and one."""


def texts_of(rank: int) -> list[str]:
    return [str(number) * (number + 1) for number in range(1, ROWS[rank] + 1)]


def scored(scorer: RewardModel, rank: int) -> list[Any]:
    texts = texts_of(rank)
    return scorer(prompts=["1+1="] * len(texts), completions=texts)


def told(scorer: RewardModel, rank: int) -> str:
    """What this rank is told where a text of the second is too long."""
    scorer.max_length = 8
    text = "1" if rank == 0 else "1" * 20
    try:
        scorer(prompts=["1="], completions=[text])
    except RewardError as error:
        return str(error)
    return ""


def run(name: str, folder: Path, devices: int, **more: Any) -> None:
    """Train with clipping, validate, and leave `name.pt`: with what each rank holds of the reward model, and says."""
    module, data = dist_equal.parts(*GRPO)
    path = scorer_in(folder)
    scorer = RewardModel(path, batch_size=2)
    module.reward_functions = Rewards(scorer)
    trainer = dist_equal.trainer(folder, devices, max_steps=STEPS, gradient_clip_val=CLIP, **more)
    trainer.fit(module, datamodule=data)
    metrics = dist_equal.logged(trainer)
    trainer.limit_val_batches = 1.0
    trainer.validate(module, datamodule=data, verbose=False)
    rank, beside = trainer.global_rank, {}
    if devices > 1:
        whole = RewardModel(path, batch_size=2)
        mine = {"scores": scored(scorer, rank), "whole": scored(whole, rank)}
        mine |= {"bytes": scorer.weight_bytes, "whole_bytes": whole.weight_bytes, "told": told(scorer, rank)}
        beside = {"ranks": module.ranks.objects(mine)}
    dist_equal.leave(module, trainer, folder / f"{name}.pt", metrics=metrics | dist_equal.logged(trainer), **beside)


def main(folder: Path) -> None:
    run("grpo", folder, 2, strategy=FSDP2Strategy())


@pytest.fixture(scope="module")
def two(two_ranks: Path) -> Any:
    return left(two_ranks / "scorers", "grpo")


def test_two_processes_learn_as_one_with_a_whole_reward_model(two: Any, tmp_path: Path) -> None:
    run("grpo", tmp_path, 1)
    assert_equal_runs(left(tmp_path, "grpo"), two, share=2e-4, beyond=2e-6, moved=1e-3)


def test_ranks_with_other_numbers_of_batches_get_the_scores_of_the_whole_model(two: Any) -> None:
    assert [len(each["scores"]) for each in two["ranks"]] == list(ROWS)
    for each in two["ranks"]:
        assert each["scores"] == pytest.approx(each["whole"], rel=1e-6)  # weights lie elsewhere: other last bits


def test_each_rank_holds_half_of_the_weights(two: Any) -> None:
    first, second = two["ranks"]
    assert first["bytes"] + second["bytes"] == first["whole_bytes"]
    assert max(first["bytes"], second["bytes"]) < 0.51 * first["whole_bytes"]


@pytest.mark.parametrize("settings", [{"cache": 4}, {"on_error": 0.0}])
def test_it_stays_whole_where_a_rank_may_call_it_by_itself(settings: dict[str, Any], tmp_path: Path) -> None:
    mesh: Any = object()  # nobody is asked
    scorer = RewardModel(scorer_in(tmp_path))
    recipes = RewardRecipes({"scorer": scorer}, {"all": {"scorer": 1.0}}, default="all")
    for rewards in (Rewards(scorer, **settings), recipes):
        rewards.load(mesh)
        assert not rewards.waits_for_ranks


def test_no_rank_waits_for_one_that_cannot_score(two: Any) -> None:
    first, second = (each["told"] for each in two["ranks"])
    assert "row 0 has" in second and "max_length=8" in second
    assert "another rank" in first
