"""Two processes draw the episodes that one draws, and learn the same from them.

Their numbers of turns differ, one of them has an environment that fails, and a rollout function asks the generator
another number of times on each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dist_episodes import KINDS, RUNS, run
from dist_equal import Ones, assert_equal_runs, left

pytestmark = [pytest.mark.dist, pytest.mark.all]


@pytest.fixture(scope="module")
def ones(tmp_path_factory: pytest.TempPathFactory) -> Ones:
    return Ones(run, tmp_path_factory.mktemp("one"))


def by_sample(rollouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was drawn, less by whom."""
    return [
        {name: {key: value for key, value in each.items() if key != "rank"} for name, each in rollout.items()}
        for rollout in rollouts
    ]


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_draw_and_learn_what_one_does(two_ranks: Path, ones: Ones, name: str) -> None:
    one, two = ones(name), left(two_ranks / "episodes", name)
    assert len(one["rollouts"]) == 2 and by_sample(one["rollouts"]) == by_sample(two["rollouts"])
    assert_equal_runs(one, two, share=1e-3, beyond=1e-6, moved=1e-4)


def test_ranks_have_other_numbers_of_turns_and_one_of_them_a_failure(two_ranks: Path) -> None:
    two = left(two_ranks / "episodes", "game")
    failed, turns = set(), []
    for rollout in two["rollouts"]:
        turns.append([sum(each["turns"] for each in rollout.values() if each["rank"] == rank) for rank in (0, 1)])
        failed |= {(name.partition("/")[0], each["rank"]) for name, each in rollout.items() if each["end"] == "failed"}
    assert any(one != other for one, other in turns), turns
    assert {int(row) for row, _ in failed} == {KINDS.index("fails")}
    of_one = [{each["rank"] for each in rollout.values() if each["end"] == "failed"} for rollout in two["rollouts"]]
    assert {frozenset(ranks) for ranks in of_one} - {frozenset()} <= {frozenset({0}), frozenset({1})}
