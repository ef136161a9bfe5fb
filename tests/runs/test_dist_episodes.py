"""Two processes draw the episodes that one draws, and learn the same from them.

Their numbers of turns differ, one of them has an environment that fails, and a rollout function asks the generator
another number of times on each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dist_episodes import KINDS, RUNS
from dist_equal import Ones, assert_equal_runs, left

pytestmark = [pytest.mark.dist, pytest.mark.all]


def by_sample(rollouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was drawn, less by whom."""
    return [
        {name: {key: value for key, value in each.items() if key != "rank"} for name, each in rollout.items()}
        for rollout in rollouts
    ]


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_draw_and_learn_what_one_does(two: Path, one: Ones, name: str) -> None:
    alone, both = one(name), left(two, name)
    assert len(alone["rollouts"]) == 2 and by_sample(alone["rollouts"]) == by_sample(both["rollouts"])
    assert_equal_runs(alone, both, share=1e-3, beyond=1e-6, moved=1e-4)


def test_ranks_have_other_numbers_of_turns_and_one_of_them_a_failure(two: Path) -> None:
    rollouts = left(two, "game")["rollouts"]
    failed, turns = set(), []
    for rollout in rollouts:
        turns.append([sum(each["turns"] for each in rollout.values() if each["rank"] == rank) for rank in (0, 1)])
        failed |= {(name.partition("/")[0], each["rank"]) for name, each in rollout.items() if each["end"] == "failed"}
    assert any(one != other for one, other in turns), turns
    assert {int(row) for row, _ in failed} == {KINDS.index("fails")}
    of_one = [{each["rank"] for each in rollout.values() if each["end"] == "failed"} for rollout in rollouts]
    assert {frozenset(ranks) for ranks in of_one} - {frozenset()} <= {frozenset({0}), frozenset({1})}
