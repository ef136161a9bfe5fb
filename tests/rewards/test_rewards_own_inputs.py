"""A function can hurt nobody but itself: what it gets is its own, its draws are seeded, and it logs under its names."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiers import in_turn

from lit_rl.core.errors import RewardError
from lit_rl.rewards import JointRewards, RewardRecipes, Rewards, Scores, TrainerState, from_paths, load_function
from lit_rl.rewards.contract import RUN_METRICS
from lit_rl.rewards.judges import FunctionJudge, PairwiseJudge, ask_judge

SOURCE = """
import random, sys

def spent(prompt, completion, info, ids):
    prompt.append(completion[0])
    completion[0]["content"] += "!"
    ids.append(0)
    info["seen"].append(1)
    return float(len(prompt) + len(completion[0]["content"]) + len(info["seen"]) + 10 * len(ids) + info.pop("target"))

def listed(prompts, completions, info, completion_ids):
    return [spent(*row) for row in zip(prompts, completions, info, completion_ids)]

def single(prompt, completion, info, completion_ids):
    return spent(prompt, completion, info, completion_ids)

async def listed_async(prompts, completions, info, completion_ids):
    return listed(prompts, completions, info, completion_ids)

async def single_async(prompt, completion, info, completion_ids):
    return spent(prompt, completion, info, completion_ids)

def marked(prompts, completions, info, completion_ids):
    return listed(prompts, completions, info, completion_ids)

marked.independent_rows = True

def draws(completions):
    return [random.random() for _ in completions]

def draws_one(completion):
    return random.random()

async def draws_async(completion):
    return random.random()

def draws_all(completions):
    import numpy, torch
    return [random.random() + numpy.random.random() + torch.rand(()).item() for _ in completions]

def verdicts(prompts, firsts, seconds, info):
    return [min(1.0, spent(*row, []) / 20) for row in zip(prompts, firsts, info)]

def verdict(prompt, first, second, info):
    return int(spent(prompt, first, info, []) > 6)
"""

PROMPT = [{"role": "user", "content": "?"}]
INFO = {"seen": [], "target": 2}
IDS = [5, 6]
SAID = [{"role": "assistant", "content": "1"}]
EACH = 2 + 2 + 1 + 30 + 2
"""What `spent` gives where nobody has changed its arguments before."""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return lambda name: f"./mine.py:{name}"


def inputs(rows: int = 4) -> tuple[list[Any], list[Any], dict[str, list[Any]], list[list[int]]]:
    """As a rollout has them: completions of one prompt share its objects, and here all of them share all."""
    prompt, said, info, ids = copy.deepcopy((PROMPT, SAID, INFO, IDS))
    return [prompt] * rows, [said] * rows, {"info": [info] * rows, "source": ["all"] * rows}, [ids] * rows


def score(made: Rewards, *, early: bool, seed: int | None = None) -> Scores:
    """Scores of completions that were told one by one, or came at once; the caller's objects stay as they were."""
    prompts, completions, columns, ids = inputs()
    state, begun = TrainerState(seed=seed), None
    if early and (begun := made.begin(prompts, columns, state)):
        for row, (completion, of_row) in enumerate(zip(completions, ids)):
            begun.tell(row, completion, of_row)
    scores = made.score(prompts, completions, columns, completion_ids=ids, trainer_state=state, begun=begun)
    assert (prompts[0], completions[0], columns["info"][0], ids[0]) == (PROMPT, SAID, INFO, IDS)
    return scores


@in_turn(early=[False, True], name=["listed", "single", "listed_async", "single_async", "marked"], workers=[0, 1, 2])
def test_each_completion_has_copies_of_its_own(mine, name: str, workers: int, early: bool):
    made = from_paths([mine(name)], workers=workers, while_generating=early)
    assert score(made, early=early).total.tolist() == [EACH] * 4


@pytest.mark.parametrize("workers", [0, 1])
def test_functions_of_a_sum_a_recipe_and_a_joint_reward_have_copies_of_their_own(mine, workers: int):
    one, two = load_function(mine("listed")), load_function(mine("single"))

    def total(prompts, completions, info, completion_ids, one, two):
        own = one.function if hasattr(one, "function") else None
        assert own is None
        one.append(0.0)
        return [a + b + len(p) for a, b, p in zip(one, two, prompts)]

    pair = {"one": one, "two": two}
    for made in (Rewards(pair, workers=workers), RewardRecipes(pair, {"all": {"one": 1.0, "two": 1.0}}, "source")):
        assert score(made, early=False).values.tolist() == [[EACH, EACH]] * 4
    joint = JointRewards(pair, total, workers=workers)
    assert score(joint, early=False).total.tolist() == [2 * EACH + 1] * 4


@pytest.mark.parametrize("workers", [0, 1])
def test_a_judge_has_copies_of_its_own(mine, workers: int):
    prompts, completions, columns, _ = inputs()
    listed = FunctionJudge(mine("verdicts"), workers=workers)
    paired = PairwiseJudge(mine("verdict"), workers=workers, both_orders=False)

    class OfTheUser:
        reads_rewards = False

        def bind(self, columns: Sequence[str]) -> None: ...

        def __call__(self, prompts, firsts, seconds, *, trainer_state, info, source):
            for prompt, first, each in zip(prompts, firsts, info):
                prompt.append(first[0])
                each["seen"].append(1)
            return [len(prompt) * len(each["seen"]) / 10 for prompt, each in zip(prompts, info)]

    def asked(judge: Any) -> list[float]:
        return ask_judge(judge, prompts, completions, completions, trainer_state=TrainerState(), **columns)

    assert asked(listed) == [(EACH - 20) / 20] * 4 and asked(paired) == [0.0] * 4 and asked(OfTheUser()) == [0.2] * 4
    assert (prompts[0], completions[0], columns["info"][0]) == (PROMPT, SAID, INFO)


# ---------------------------------------------------------------------- random numbers


@pytest.mark.parametrize(("name", "workers"), [("draws", 0), ("draws", 1), ("draws_one", 0), ("draws_one", 2)])
def test_what_a_function_draws_is_that_of_the_seed_the_function_and_the_completion(mine, name: str, workers: int):
    found = [score(from_paths(mine(name), workers=workers), early=early, seed=7).total for early in (False, True)]
    assert torch.equal(*found) and len(set(found[0].tolist())) == 4
    other = score(from_paths(mine(name), workers=workers), early=False, seed=8).total
    renamed = score(Rewards({"other": load_function(mine(name))}, workers=workers), early=False, seed=7).total
    assert not torch.equal(found[0], other) and not torch.equal(found[0], renamed)


def test_async_functions_of_a_worker_draw_the_same_before_they_first_await(mine):
    first, second = (score(from_paths(mine("draws_async")), early=True, seed=7).total for _ in range(2))
    assert torch.equal(first, second) and len(set(first.tolist())) == 4


def test_draws_in_this_process_are_those_of_a_worker_and_leave_the_generators_as_they_were(mine):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    here = score(from_paths(mine("draws_all"), workers=0), early=False, seed=7).total
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert torch.equal(score(from_paths(mine("draws_all"), workers=0), early=False, seed=7).total, here)


def test_without_a_seed_nothing_is_seeded_and_nothing_put_back(mine):
    made = from_paths(mine("draws"), workers=0)
    random.seed(1)
    assert not torch.equal(score(made, early=False).total, score(made, early=False).total)
    random.seed(1)
    expected = [random.random() for _ in range(4)]
    random.seed(1)
    assert score(made, early=False).total.tolist() == pytest.approx(expected)


def test_generators_are_put_back_where_a_function_raises():
    def raises(completions):
        random.random()
        raise ValueError

    before = random.getstate()
    with pytest.raises(RewardError):
        score(Rewards(raises), early=False, seed=7)
    assert random.getstate() == before


def test_a_judge_of_the_user_draws_by_the_seed_and_leaves_the_generators_as_they_were():
    class Draws:
        reads_rewards = False

        def bind(self, columns: Sequence[str]) -> None: ...

        def __call__(self, prompts, firsts, seconds, *, trainer_state):
            return [random.random() for _ in prompts]

    before = random.getstate()
    first, second = (ask_judge(Draws(), ["p"], ["a"], ["b"], trainer_state=TrainerState(seed=3)) for _ in range(2))
    assert first == second and random.getstate() == before


# ---------------------------------------------------------------------- names


def logging(metric: Any = None, column: Any = None, names: Sequence[str] = ("mine",)) -> Scores:
    def logs(completions, log_metric, log_extra):
        if metric is not None:
            log_metric(metric, 1.0)
        if column is not None:
            log_extra(column, [1] * len(completions))
        return [0.0] * len(completions)

    return Rewards(dict.fromkeys(names, logs)).score(["p"], ["c"], {"answer": ["1"]})


def documented(root: Path) -> set[str]:
    """Names of metrics of methods that learn from rollouts, without `train/`."""
    page = (root / "docs" / "metrics.md").read_text().partition("\n## Methods that learn from a data set")[0]
    return set(re.findall(r"^\| `train/([^`]+)`", page, re.MULTILINE))


def test_no_function_logs_under_a_name_of_the_run(root: Path):
    names = {re.sub("<fn>", "mine", name) for name in documented(root)} - {"verifiers/<name>"}
    run_has = ["mean", "std", "failure_ratio", "timeout_ratio", "cache_hit_ratio"]
    of_functions = {f"rewards/mine/{name}" for name in run_has}
    names = {name for name in names if not name.startswith("rewards/mine/") or name in of_functions}  # judges log more
    assert len(names) > 100 and RUN_METRICS - names == {"aux_loss"}
    for name in (*names, "rewards/other/mean"):
        with pytest.raises(RewardError, match=re.escape(f"log_metric({name!r}, ...) of 'mine'")) as error:
            logging(name)
        (free,) = re.findall(r"'([^']+)' is free", str(error.value))
        assert list(logging(free).metrics) == [free]


@pytest.mark.parametrize("name", ["accuracy", "rewards/mine/accuracy", "my/loss", "lengths", "Reward"])
def test_other_names_are_free(name: str):
    scores = logging(name, name)
    assert list(scores.metrics) == list(scores.extras) == [name]


@pytest.mark.parametrize("name", ["answer", "reward", "advantage", "completion", "rewards/other", "tokens/ids", "win"])
def test_no_function_notes_a_column_that_is_there(name: str):
    with pytest.raises(RewardError, match=re.escape(f"log_extra({name!r}, ...) of 'mine'")) as error:
        logging(column=name)
    (free,) = re.findall(r"'([^']+)' is free", str(error.value))
    assert list(logging(column=free).extras) == [free]


@pytest.mark.parametrize("name", [3, "", " ", None, "a\nb", ("a", "b")])
def test_a_name_is_a_line_of_text(name: Any):
    for service in ("log_metric", "log_extra"):

        def logs(completion, log_metric, log_extra, service=service):
            {"log_metric": log_metric, "log_extra": log_extra}[service](name, 1)
            return 0.0

        with pytest.raises(RewardError, match=rf"{service}\(.*not empty and has no line break"):
            Rewards(logs).score(["p"], ["c"], {})


def test_two_functions_log_under_two_names():
    """But for a column of which they say the same, and one that says what the data's says: functions of TRL do so."""
    refused = "'found'.*called by 'two' and by a function before it.*'two/found'"
    with pytest.raises(RewardError, match=refused):
        logging("found", names=("one", "two"))

    def notes(value: str) -> Any:
        def function(completions, answer, log_extra):
            log_extra("found", [value] * len(completions))
            log_extra("answer", list(answer))
            return [0.0] * len(completions)

        return function

    def noted(one: str, two: str) -> dict[str, Any]:
        return Rewards({"one": notes(one), "two": notes(two)}).score(["p"], ["c"], {"answer": ["1"]}).extras

    assert noted("a", "a") == {"found": ["a"], "answer": ["1"]}
    with pytest.raises(RewardError, match=refused):
        noted("a", "b")
