"""A function of several rewards: what it is given, what its result counts, how it is called and refused."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.rewards import Rewards
from lit_rl.rewards.combinations import JointRewards

TEXTS = ["a", "bb", "", "dddd"]


def length(completions):
    return [float(len(text)) if text else None for text in completions]


def places(completion):
    return [(0, len(completion), 2.0)] if completion else 0.0


def product(length, places, bonus, log_metric):
    log_metric("asked", len(length))
    return [None if a is None else a * b + c for a, b, c in zip(length, places, bonus)]


def score(rewards: Rewards, **columns: Any) -> Any:
    return rewards.score(["p"] * 4, TEXTS, {"bonus": [0.5, 0.0, 0.0, -1.0], **columns})


def test_the_total_is_what_it_makes_of_the_values_and_columns():
    rewards = JointRewards({"length": length, "places": places}, product)
    rewards.bind(["bonus"])
    scores = score(rewards)
    assert scores.names == ("length", "places", "joint")
    assert scores.total.tolist() == pytest.approx([2.5, 4.0, math.nan, 7.0], nan_ok=True)
    assert scores.values[:, 2].tolist() == pytest.approx(scores.total.tolist(), nan_ok=True)
    assert scores.values[:, 0].tolist() == pytest.approx([1, 2, math.nan, 4], nan_ok=True)
    assert scores.values[:, 1].tolist() == [2, 2, 0, 2]
    assert scores.weights.tolist() == [[0.0, 0.0, 1.0]] * 4
    assert scores.metrics["asked"] == (4, 1)
    assert scores.span_rewards is None, "spans are summed before, so nothing is earned at a place"


def test_rows_that_are_left_out_are_unscored():
    rewards = JointRewards({"length": length}, lambda length: [value * 10 for value in length])
    scores = rewards.score(["p"] * 4, TEXTS, {}, rows=[0, 3])
    assert scores.total.tolist() == pytest.approx([10.0, math.nan, math.nan, 40.0], nan_ok=True)
    assert rewards.score([], [], {}).total.tolist() == []


def test_by_path_it_runs_in_a_process_and_early_calls_of_its_parts_count(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\n"
        "async def size(completion):\n    return float(len(completion))\n"
        "def total(size, log_extra):\n"
        "    log_extra('where', [os.getpid()] * len(size))\n"
        "    return [min(value, 3.0) for value in size]\n"
    )

    async def size(completion):
        return float(len(completion))

    rewards = JointRewards({"size": size}, f"{file}:total")
    begun = rewards.begin(["p"] * 4, {})
    assert begun is not None
    ids = [[i] for i in range(4)]
    for row in (2, 0):
        begun.tell(row, TEXTS[row], ids[row])
    scores = rewards.score(["p"] * 4, TEXTS, {}, completion_ids=ids, begun=begun)
    assert scores.total.tolist() == [1.0, 2.0, 0.0, 3.0]
    assert set(scores.extras["where"]) != {os.getpid()}


def test_each_can_be_asked_alone():
    rewards = JointRewards({"length": length, "places": places}, product)
    assert score(rewards.only("length")).total.tolist() == pytest.approx([1, 2, math.nan, 4], nan_ok=True)
    assert score(rewards.only("joint")).total.tolist()[:2] == [2.5, 4.0]


def test_a_failure_of_it_has_the_score_of_a_failure():
    def fails(length):
        raise ValueError("no")

    with pytest.warns(UserWarning, match="joint"):
        scores = score(JointRewards({"length": length}, fails, on_error=-1.0))
    assert scores.total.tolist() == [-1.0] * 4
    with pytest.raises(RewardError, match="'joint' raised ValueError"):
        score(JointRewards({"length": length}, fails))


def test_what_does_not_go_together_is_refused():
    with pytest.raises(RewardError, match=r"joint.*'places'.*bonus, length"):
        JointRewards({"length": length}, product).bind(["bonus"])
    with pytest.raises(ConfigError, match="reward.functions.length: "):
        JointRewards({"length": length}, product).bind(["length"])
