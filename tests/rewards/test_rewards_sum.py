"""Names, weights and the weighted sum."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.core.errors import RewardError
from lit_rl.rewards import Length, RegexFormat, Rewards, contains, exact_match

VALUES = st.none() | st.floats(-100, 100, width=32)


@st.composite
def tables(draw):
    """Values (b, k) with None, and k weights."""
    functions = draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(VALUES, min_size=functions, max_size=functions), max_size=6))
    return rows, draw(st.lists(st.floats(-10, 10), min_size=functions, max_size=functions))


def column(k: int):
    """A reward that reads its values from the data, so that they travel with their rows."""
    return lambda completions, table: [row[k] for row in table]


def scored(rows, weights):
    rewards = Rewards({f"f{k}": column(k) for k in range(len(weights))}, weights)
    return rewards.score([""] * len(rows), [""] * len(rows), {"table": rows})


@given(tables())
def test_total_is_the_weighted_sum_over_functions_that_apply(table):
    rows, weights = table
    scores = scored(rows, weights)
    assert scores.values.shape == (len(rows), len(weights)) and scores.total.shape == (len(rows),)
    for row, total in zip(rows, scores.total.tolist(), strict=True):
        applicable = [weight * value for weight, value in zip(weights, row) if value is not None]
        if applicable:
            assert total == pytest.approx(sum(applicable), rel=1e-5, abs=1e-4)
        else:
            assert total != total  # NaN


@given(tables(), st.randoms(use_true_random=False))
def test_scores_follow_their_rows(table, random):
    rows, weights = table
    order = random.sample(range(len(rows)), len(rows))
    before, after = scored(rows, weights), scored([rows[i] for i in order], weights)
    assert torch.equal(after.values.nan_to_num(-7), before.values[order].nan_to_num(-7))
    assert torch.equal(after.total.nan_to_num(-7), before.total[order].nan_to_num(-7))


def test_a_sum_beyond_float32_is_refused():
    with pytest.raises(RewardError, match="does not fit into float32"), pytest.warns(UserWarning):
        scored([[3e38]], [1e3])


def ones(completions):
    return [1.0] * len(completions)


def twos(completions):
    return [2.0] * len(completions)


def test_weights_go_by_name_and_default_to_one():
    rewards = Rewards([ones, twos], {"twos": 0.5})
    assert rewards.weights == {"ones": 1.0, "twos": 0.5}
    assert rewards.score(["p"], ["c"], {}).total.tolist() == [2.0]
    assert Rewards([ones, twos], [3, -1]).score(["p"], ["c"], {}).total.tolist() == [1.0]


def test_names_come_from_keys_functions_and_classes():
    assert Rewards({"a": ones, "b": ones}).names == ("a", "b")
    assert Rewards([ones, RegexFormat(), Length(3)]).names == ("ones", "regex_format", "length")
    assert Rewards(ones).names == ("ones",)
    assert Rewards(lambda completions: []).names == ("lambda",)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))], ids=["deepcopy", "pickle"])
def test_rewards_survive_copies(clone):
    rewards = Rewards([exact_match, contains, RegexFormat("x+"), Length(1)], [1.0, 0.5, 0.25, 0.125])
    inputs = (["p", "p"], ["xx", "yyy"], {"answer": ["xx", "y"]})
    assert clone(rewards).score(*inputs).total.tolist() == rewards.score(*inputs).total.tolist() == [1.75, 0.5]
