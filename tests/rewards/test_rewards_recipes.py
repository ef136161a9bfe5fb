"""Recipes: which functions score a row, and with what weight, is said by a column."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.core.errors import RewardError
from lit_rl.rewards import RewardRecipes

RECIPES = {"math": {"number": 2.0}, "chat": {"later": 0.5, "number": -1.0}, "code": {"one": 3.0}}


def number(completions, value):
    return list(value)


async def later(completions, value):
    return [10.0 + v for v in value]


def one(completion, value, log_extra):
    log_extra("seen", completion)
    return 100.0 + value


def recipes(**settings) -> RewardRecipes:
    return RewardRecipes({"number": number, "later": later, "one": one}, RECIPES, **settings)


def score(reward, sources, values):
    rows = len(sources)
    texts = [f"c{i}" for i in range(rows)]
    return reward.score(
        ["p"] * rows, texts, {"source": sources, "value": values}, completion_ids=[[i] for i in range(rows)]
    )


def alone(source: str, value: float) -> float:
    table = {"math": 2 * value, "chat": 0.5 * (10 + value) - value, "code": 3 * (100 + value)}
    return table[source]


ROWS = st.lists(st.tuples(st.sampled_from(sorted(RECIPES)), st.integers(-5, 5)), max_size=6)


@given(ROWS)
def test_a_row_is_worth_what_its_recipe_says(rows):
    scores = score(recipes(), [source for source, _ in rows], [float(value) for _, value in rows])
    assert scores.total.tolist() == pytest.approx([alone(*row) for row in rows])
    assert torch.equal((scores.weights * scores.values).nansum(1), scores.total)
    for (source, _), values in zip(rows, scores.values.tolist()):
        applied = {name for name, value in zip(scores.names, values) if value == value}
        assert applied == set(RECIPES[source])


def test_values_are_the_functions_own_and_the_weights_of_each_row_stand_beside_them():
    """What normalises a function's values before it weighs them (GDPO) would divide a weight inside them out."""
    scores = score(recipes(), ["math", "chat", "code"], [1.0, 2.0, 3.0])
    assert scores.names == ("number", "later", "one")
    assert scores.weights.tolist() == [[2.0, 0.0, 0.0], [-1.0, 0.5, 0.0], [0.0, 0.0, 3.0]]
    nan = math.nan
    expected = torch.tensor([[1.0, nan, nan], [2.0, 12.0, nan], [nan, nan, 103.0]])
    torch.testing.assert_close(scores.values, expected, equal_nan=True)


def test_a_function_sees_only_its_rows():
    asked = []

    def watch(prompts, completions, completion_ids, source, value, log_extra):
        asked.append((prompts, completions, completion_ids, source, value))
        log_extra("index", [ids[0] for ids in completion_ids])
        return [1.0] * len(completions)

    reward = RewardRecipes({"watch": watch, "number": number}, {"a": {"watch": 1.0}, "b": {"number": 1.0}})
    scores = score(reward, ["b", "a", "b", "a"], [0.0, 1.0, 2.0, 3.0])
    assert asked == [(["p"] * 2, ["c1", "c3"], [[1], [3]], ["a", "a"], [1.0, 3.0])]
    assert scores.total.tolist() == [0.0, 1.0, 2.0, 1.0]
    assert scores.extras == {"index": [None, 1, None, 3]}
    score(reward, ["b"], [0.0])
    assert len(asked) == 1  # not called without a row


def test_spans_carry_the_weight():
    def spans(completions):
        return [[(0, 1, 1.0), (1, 2, 2.0)] for _ in completions]

    reward = RewardRecipes({"spans": spans, "number": number}, {"a": {"spans": 0.5}, "b": {"number": 1.0}})
    scores = score(reward, ["a", "b"], [0.0, 4.0])
    assert scores.total.tolist() == [1.5, 4.0]
    assert scores.span_rewards == [[(0, 1, 0.5), (1, 2, 1.0)], []]


def test_rows_without_a_recipe():
    with pytest.raises(RewardError, match=r"row 1 has source='mth'.*Did you mean 'math'"):
        score(recipes(), ["math", "mth"], [1.0, 1.0])
    with pytest.raises(RewardError, match="row 0 has source=None"):
        score(recipes(), [None], [1.0])
    scores = score(recipes(default="math"), [None, "other", "chat"], [1.0, 2.0, 0.0])
    assert scores.total.tolist() == [2.0, 4.0, 5.0]


def test_numbers_name_recipes_too():
    reward = RewardRecipes({"number": number}, {1: {"number": 1.0}, "2": {"number": 2.0}})  # pyright: ignore
    assert score(reward, [1, 2], [3.0, 3.0]).total.tolist() == [3.0, 6.0]


def test_a_failing_function_is_scored_as_rewards_does():
    def fragile(completion, value):
        return 1 / value

    reward = RewardRecipes(
        {"fragile": fragile, "number": number}, {"a": {"fragile": 2.0}, "b": {"number": 1.0}}, on_error=-1
    )
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        assert score(reward, ["b", "a", "a"], [0.0, 0.0, 2.0]).total.tolist() == [0.0, -2.0, 1.0]


def test_bind():
    recipes().bind(["source", "value"])
    with pytest.raises(RewardError, match=r"no column 'source'.*sources.*Did you mean"):
        recipes().bind(["sources", "value"])
    with pytest.raises(RewardError, match="'value'"):
        recipes().bind(["source"])
    with pytest.raises(RewardError, match="no column 'kind'"):
        score(recipes(column="kind"), ["math"], [1.0])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))], ids=["deepcopy", "pickle"])
def test_recipes_survive_copies(clone):
    rows = (["math", "chat", "code"], [1.0, 2.0, 3.0])
    assert score(clone(recipes()), *rows).total.tolist() == score(recipes(), *rows).total.tolist() == [2.0, 4.0, 309.0]
