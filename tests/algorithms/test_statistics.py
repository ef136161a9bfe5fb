"""Intervals, pass@k and averages against their definitions."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_rollouts import batch, completions

from lit_rl.algorithms.evaluation.summary_statistics import Averages, mean_with_interval, pass_at_k, rollout_metrics
from lit_rl.algorithms.evaluation.validation import EvaluationRows
from lit_rl.callbacks.preference_sets import PreferenceSets
from lit_rl.core.rollout import PromptBatch
from lit_rl.ops.reductions import Highest, Lowest, Metrics, Summed, masked_moments
from lit_rl.rewards import JointRewards, RewardRecipes, Rewards
from lit_rl.rewards.weighted_rewards import Scores
from lit_rl.runs.evaluate import _best_completion


@given(n=st.integers(1, 7), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, data):
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    marks = [1] * right + [0] * (n - right)
    subsets = list(itertools.combinations(range(n), k))
    expected = sum(any(marks[i] for i in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(right, n, k) == pytest.approx(expected)


def test_pass_at_k_outside_its_range():
    with pytest.raises(ValueError, match="outside"):
        pass_at_k(1, 2, 3)


def test_wilson_interval_of_seven_in_ten():
    """Newcombe (1998), the score method without continuity correction."""
    mean, low, high = mean_with_interval(torch.tensor([1.0] * 7 + [0.0] * 3))
    assert (mean, low, high) == pytest.approx((0.7, 0.3968, 0.8922), abs=1e-4)


def test_the_interval_of_a_mean_is_two_standard_errors_wide_on_each_side():
    mean, low, high = mean_with_interval(torch.tensor([0.0, 2.0, 4.0, 6.0]))
    assert (mean, low, high) == pytest.approx((3.0, 3.0 - 2.5303, 3.0 + 2.5303), abs=1e-3)  # 1.96 sqrt(20 / 3) / 2


@given(st.integers(1, 40), st.data())
def test_intervals_hold_the_mean_and_stay_between_zero_and_one(n, data):
    x = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n)))
    mean, low, high = mean_with_interval(x)
    assert 0 <= low <= mean + 1e-12 and mean - 1e-12 <= high <= 1


def test_interval_of_nothing_is_nan():
    assert all(math.isnan(value) for value in mean_with_interval(torch.zeros(0)))


def test_averages_are_sums_over_sums():
    averages = Averages()
    averages.add({"x": (torch.tensor(6.0), torch.tensor(2.0))})
    averages.add({"x": (torch.tensor(1.0), torch.tensor(8.0)), "empty": (torch.tensor(0.0), torch.tensor(0.0))})
    result = averages.reduce()
    assert result["x"] == pytest.approx(0.7) and math.isnan(result["empty"])
    assert averages.reduce() == {}


def of_part(numbers: list[float]) -> Metrics:
    """What a micro-batch with these numbers says of itself, one metric of each kind."""
    x, mask = torch.tensor([numbers]), torch.ones(1, len(numbers), dtype=torch.bool)
    return {
        "mean": (x.sum(), torch.tensor(float(len(numbers)))),
        "highest": Highest(x.max()),
        "lowest": Lowest(x.min()),
        "variance": Summed(masked_moments(x, mask), "variance"),
    }


@given(st.lists(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=4), min_size=1, max_size=5), st.data())
def test_how_a_rollout_is_cut_and_where_it_is_resumed_changes_no_number(parts, data):
    cut = data.draw(st.integers(0, len(parts)))
    first, second, whole = Averages(), Averages(), Averages()
    for part in parts[:cut]:
        first.add(of_part(part))
    second.load_state(first.state(), torch.device("cpu"))
    for part in parts[cut:]:
        second.add(of_part(part))
    whole.add(of_part([x for part in parts for x in part]))
    found = second.reduce()
    assert found == pytest.approx(whole.reduce(), rel=1e-4, abs=1e-5)
    assert set(found) == {"mean", "highest", "lowest", "variance"}
    assert (found["highest"], found["lowest"]) == (max(map(max, parts)), min(map(min, parts)))


N = math.nan


def test_rollout_metrics_by_hand():
    metrics = rollout_metrics(
        ["a", "b", "c"],
        values=torch.tensor([[1.0, 0.0, N], [0.0, N, N], [1.0, 1.0, N], [N, N, N]]),
        rewards=torch.tensor([1.0, 0.0, 2.0, math.nan]),
        group_id=torch.tensor([7, 7, 3, 3]),
        lengths=torch.tensor([2, 4, 6, 8]),
        ended=torch.tensor([True, True, True, False]),
    )
    assert metrics["reward"] == 1.0
    assert metrics["reward_std"] == 1.0
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 / 3)
    assert metrics["completions/unscored"] == 1
    assert metrics["completions/clipped_ratio"] == 0.25
    assert (metrics["completions/mean_length"], metrics["completions/mean_terminated_length"]) == (5, 4)
    assert math.isnan(metrics["rewards/c/mean"]) and math.isnan(metrics["rewards/c/std"])  # it never applied
    assert metrics["rewards/b/mean"] == 0.5 and metrics["rewards/a/std"] == pytest.approx(math.sqrt(1 / 3))


class _Row:
    episodes = None

    def __init__(self, lengths, ended):
        self.lengths, self.ended = torch.tensor(lengths), torch.tensor(ended)
        self.on_host = self


@pytest.mark.parametrize("names", [("f",), ()])
def test_a_validation_has_the_spreads_and_lengths_of_a_rollout(names):
    """Two completions of two prompts, by hand; without a reward there is nothing to spread."""
    rows = EvaluationRows()
    totals = torch.tensor([1.0, 1.0, 0.0, 2.0]) if names else torch.full((4,), N)
    values = totals[:, None] if names else torch.zeros(4, 0)
    batch = PromptBatch(["p"] * 2, [[1]] * 2, {}, [0, 1], [0, 0])
    scores = Scores(names, values, totals, torch.ones(4, len(names)))
    rows.add(batch, _Row([2, 4, 6, 8], [True, True, True, False]), scores)  # type: ignore[arg-type]
    lengths = {"mean": 5, "min": 2, "max": 8, "mean_terminated": 4, "min_terminated": 2, "max_terminated": 6}
    expected = {f"completions/{name}_length": length for name, length in lengths.items()} | {
        "completions/clipped_ratio": 0.25,
        "prompts": 2,
    }
    found = rows.metrics()
    if names:
        std = math.sqrt(2 / 3)
        expected |= {"reward_std": std, "rewards/f/std": std, "frac_reward_zero_std": 0.5, "rewards/f/mean": 1.0}
        found = {name: value for name, value in found.items() if "pass@" not in name and name not in REWARD}
    assert found == pytest.approx(expected)


REWARD = ("reward", "reward_low", "reward_high")


def test_a_row_that_two_ranks_saw_counts_once():
    rows = EvaluationRows()
    for indices, totals in [([0, 1], [1.0, 0.0]), ([1, 2], [0.0, 0.0])]:
        batch = PromptBatch(["p"] * 2, [[1]] * 2, {}, indices, [0, 0])
        scores = Scores(("f",), torch.tensor(totals)[:, None], torch.tensor(totals), torch.ones(2, 1))
        rows.add(batch, _Row([3, 3], [True, True]), scores)  # type: ignore[arg-type]
    metrics = rows.metrics()
    assert metrics["prompts"] == 3 and metrics["reward"] == pytest.approx(1 / 3)


def said_of(*values: list[float | None]) -> Any:
    """Scores of one function, or of several, that give these values; groups of four."""
    functions = {f"f{i}": (lambda completions, column=column: column) for i, column in enumerate(values)}
    count = len(values[0])
    return Rewards(functions).score(["p"] * count, ["c"] * count, {})


def test_none_is_no_sample_and_zero_is_a_score_in_a_validation():
    missing = [None] * 4
    first = said_of([None, 0.0, 1.0, None, *missing, 0.0, 0.0, 0.0, None], [*missing, *missing, 0.0, None, None, None])
    rows = EvaluationRows()
    rows.add(batch(range(3)), completions([1] * 12, 4), first)
    found = rows.metrics()
    assert (found["reward"], found["prompts"]) == (0.25, 2.0), "means of (0, 1) and of zeros, none of the second prompt"
    assert found["rewards/f0/mean"] == pytest.approx(1 / 5) and found["rewards/f1/mean"] == 0.0
    assert (found["pass@1"], found["pass@2"]) == (0.25, 0.5) and math.isnan(found["pass@4"])


def test_none_is_no_member_and_zero_is_one_of_the_best_and_of_pairs():
    values = [None, 0.0, -1.0, None, None, None, None, None, 0.0, None, None, None]
    said = said_of(values)
    table = {
        "completion": [f"c{i}" for i in range(12)],
        "reward": said.total.tolist(),
        "ended": [True] * 12,
        "step": [3] * 12,
    }
    best = [_best_completion({name: column[i : i + 4] for name, column in table.items()}) for i in (0, 4, 8)]
    assert [each and (each.row["completion"], each.row["reward"], each.mean) for each in best] == [
        ("c1", 0.0, -0.5),
        None,
        ("c8", 0.0, 0.0),
    ]
    tokens = SimpleNamespace(get_added_vocab=dict, all_special_tokens=[], added_tokens_decoder={})
    module = SimpleNamespace(scored=SimpleNamespace(batch=batch(range(3))), samples=table, tokenizer=tokens)
    sets = PreferenceSets(threshold=0.0).rows(module)
    assert [(row["chosen"], row["rejected"]) for row in sets["pairs"]] == [("c1", "c2")]
    assert [(row["completion"], row["label"]) for row in sets["verdicts"]] == [
        ("c1", True),
        ("c2", False),
        ("c8", True),
    ]


@pytest.mark.parametrize("recipes", [False, True])
def test_a_sum_is_none_only_where_no_part_applies(recipes: bool):
    one, two = [None, 0.0, 1.0, None], [None, None, 0.0, 0.0]
    functions = {"one": lambda completions: one, "two": lambda completions: two}
    made = RewardRecipes(functions, {"a": {"one": 1.0, "two": 0.5}}) if recipes else Rewards(functions, [1.0, 0.5])
    total = made.score(["p"] * 4, ["c"] * 4, {"source": ["a"] * 4}).total.tolist()
    assert math.isnan(total[0]) and total[1:] == [0.0, 1.0, 0.0]
    joint = JointRewards(functions, lambda one, two: [None if a is None else a for a in one])
    assert joint.score(["p"] * 4, ["c"] * 4, {}).total.isnan().tolist() == [True, False, False, True]
