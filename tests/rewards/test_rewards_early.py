"""Rewards of completions that come one by one: what is said is what the whole batch would have been told."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import in_turn

from lit_rl.core.errors import RewardError
from lit_rl.rewards import RewardRecipes, Rewards, Scores, from_paths

PROMPTS = [f"p{i // 4}" for i in range(12)]
COMPLETIONS = [f"{'x' * (i % 5)} {i}" for i in range(12)]
IDS = [[i, i + 1] for i in range(12)]
COLUMNS = {"level": list(range(12)), "source": ["a", "b", "c"] * 4}

MINE = """
import os, time

def alone(completion, level, log_metric, log_extra):
    log_metric("level", level)
    log_extra("seen", completion.upper())
    return None if level == 5 else [(0, 1, level), (0, 1, 0.5)] if completion[0] == "x" else float(level)

def raises(completion, level):
    if level in (4, 9):
        raise ValueError(f"level {level}")
    return float(level)

def ends(completion, level):
    if level == 7:
        os._exit(3)
    return float(level)

def hangs(completion, level):
    while level == 7:
        time.sleep(1)
    return float(level)

def text(completion, level):
    return "seven" if level == 7 else 1.0

def marked(completions, level, prompts):
    return [len(p) + n for p, n in zip(prompts, level)]

marked.independent_rows = True
"""


async def waits(prompt: str, completion: str, completion_ids: list[int], trainer_state: Any) -> float:
    await asyncio.sleep(0)
    return len(prompt) + len(completion) + sum(completion_ids) + trainer_state.step


async def judged(completion: str) -> float:
    return float(len(completion))


def listed(completions: Sequence[str], level: Sequence[int], log_extra: Callable[..., None]) -> list[float]:
    log_extra("listed", [completion * 2 for completion in completions])
    return [float(n) for n in level]


listed.independent_rows = True


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return "./mine.py"


def early(rewards: Rewards, told: Sequence[int]) -> Scores:
    """The scores where these rows were over before the others, in this order."""
    begun = rewards.begin(PROMPTS, COLUMNS)
    assert begun is not None
    for row in told:
        begun.tell(row, COMPLETIONS[row], IDS[row])
    return rewards.score(PROMPTS, COMPLETIONS, COLUMNS, completion_ids=IDS, begun=begun)


def late(rewards: Rewards) -> Scores:
    return rewards.score(PROMPTS, COMPLETIONS, COLUMNS, completion_ids=IDS)


def assert_same(ours: Scores, theirs: Scores) -> None:
    for name in ("values", "total", "weights"):
        assert torch.equal(getattr(ours, name).nan_to_num(-7), getattr(theirs, name).nan_to_num(-7)), name
    assert (ours.names, ours.metrics, ours.extras, ours.span_rewards) == (
        theirs.names, theirs.metrics, theirs.extras, theirs.span_rewards,
    )  # fmt: skip
    assert list(ours.metrics) == list(theirs.metrics) and list(ours.extras) == list(theirs.extras)


ORDERS = {
    "none": [],
    "some": [7, 2, 11],
    "all": random.Random(0).sample(range(12), 12),
}


@in_turn(told=ORDERS.values(), workers=[1, 3])
def test_what_is_said_does_not_depend_on_who_was_over_first(mine: str, told: Sequence[int], workers: int) -> None:
    by_path = from_paths([f"{mine}:alone", f"{mine}:marked"], workers=workers).functions
    functions = {**by_path, "waits": waits, "listed": listed, "whole": lambda completions: [1.0] * 12}
    weights = {"waits": 0.5, "listed": 2.0}
    assert_same(*(score(Rewards(functions, weights, workers=workers)) for score in (lambda r: early(r, told), late)))


def test_a_row_is_scored_by_the_functions_of_its_recipe_alone() -> None:
    asked: list[int] = []

    async def counted(completion: str, level: int) -> float:
        asked.append(level)
        return float(level)

    recipes = {"a": {"counted": 2.0}, "b": {"listed": 1.0}, "c": {"counted": 1.0, "listed": 0.5}}
    rewards = RewardRecipes({"counted": counted, "listed": listed}, recipes)
    assert_same(early(rewards, ORDERS["all"]), late(rewards))
    of_counted = [row for row in range(12) if COLUMNS["source"][row] != "b"]
    assert sorted(asked) == sorted(of_counted * 2)  # once for each of the two scores


def test_no_row_is_asked_about_twice_and_a_row_that_came_otherwise_is_asked_anew() -> None:
    asked: list[str] = []

    async def counted(completion: str) -> float:
        asked.append(completion)
        return float(len(completion))

    rewards = Rewards(counted)
    begun = rewards.begin(PROMPTS, COLUMNS)
    assert begun is not None
    for row in (3, 1, 3):
        begun.tell(row, COMPLETIONS[row], IDS[row])
    begun.tell(5, "another text", IDS[5])
    begun.tell(6, COMPLETIONS[6], [99])
    scores = rewards.score(PROMPTS, COMPLETIONS, COLUMNS, completion_ids=IDS, begun=begun)
    assert scores.total.tolist() == [len(completion) for completion in COMPLETIONS]
    assert sorted(asked) == sorted([*COMPLETIONS, "another text", COMPLETIONS[6]])


@in_turn(name=["raises", "ends", "text"], told=[ORDERS["some"], ORDERS["all"]])
def test_a_failure_ends_the_run_in_the_same_words(mine: str, name: str, told: Sequence[int]) -> None:
    """The first row that fails is named, whichever was over first. Only how many completions a call had may differ."""
    said = []
    for score in (lambda rewards: early(rewards, told), late):
        with pytest.raises(RewardError) as caught:
            score(from_paths(f"{mine}:{name}"))
        said.append(str(caught.value))
    if name == "ends":
        said = [text.partition("while it scored")[0] for text in said]
    assert said[0] == said[1] and repr(name) in said[0]


@pytest.mark.parametrize("name", ["raises", "ends", pytest.param("hangs", marks=pytest.mark.all)])
def test_a_failure_that_has_a_score_has_the_same(mine: str, name: str) -> None:
    rewards = [from_paths(f"{mine}:{name}", on_error=-1.0, timeout=1.0) for _ in range(2)]
    with pytest.warns(UserWarning, match=f"{name}.*failed on"):
        assert_same(early(rewards[0], ORDERS["all"]), late(rewards[1]))


def test_functions_that_may_look_at_other_rows_see_the_whole_batch_once() -> None:
    batches: list[int] = []

    def compares(completions: Sequence[str]) -> list[float]:
        batches.append(len(completions))
        return [len(completion) - len(completions[0]) for completion in completions]

    async def compares_too(completions: Sequence[str]) -> list[float]:
        return compares(completions)

    def logs(completions: Sequence[str], log_metric: Callable[..., None]) -> list[float]:
        log_metric("mean", 1.0)
        return compares(completions)

    logs.independent_rows = True

    def sync(completion: str) -> float:
        assert threading.current_thread() is threading.main_thread()
        return 0.0

    assert Rewards([compares, compares_too, logs, sync]).begin(PROMPTS, COLUMNS) is None
    assert Rewards(judged, cache=8).begin(PROMPTS, COLUMNS) is None
    assert Rewards(waits, while_generating=False).begin(PROMPTS, COLUMNS) is None
    assert Rewards(None).begin(PROMPTS, COLUMNS) is None
    scores = early(Rewards([compares, compares_too, logs, sync, waits]), ORDERS["all"])
    assert batches == [12] * 3 and scores.metrics["mean"] == (1.0, 1)
