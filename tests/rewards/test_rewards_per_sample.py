"""Functions that take one completion at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.core.errors import RewardError
from lit_rl.rewards import Rewards


def together(prompts, completions, answer):
    return [None if a is None else len(p) + 2.0 * len(c) - a for p, c, a in zip(prompts, completions, answer)]


def alone(prompt, completion, answer):
    return None if answer is None else len(prompt) + 2.0 * len(completion) - answer


async def alone_async(prompt, completion, answer):
    return alone(prompt, completion, answer)


ROWS = st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5), st.none() | st.integers(0, 9)), max_size=6)


@given(ROWS)
def test_one_at_a_time_is_the_same_as_together(rows):
    prompts, completions, answer = ([row[i] for row in rows] for i in range(3))
    scores = Rewards([together, alone, alone_async]).score(prompts, completions, {"answer": answer})
    expected = scores.values[:, :1].nan_to_num(-7)
    assert scores.values.nan_to_num(-7).tolist() == expected.expand(-1, 3).tolist()


def test_it_gets_one_value_of_everything():
    seen = []

    def my_reward(prompt, completion, **row):
        seen.append((prompt, completion, row["completion_ids"], row["level"], row["trainer_state"].step))
        assert set(row) == {"completion_ids", "trainer_state", "log_metric", "log_extra", "level"}
        return 0.0

    Rewards(my_reward).score(["p", "q"], ["c", "d"], {"level": [1, 2]}, completion_ids=[[5, 6], [7]])
    assert seen == [("p", "c", [5, 6], 1, 0), ("q", "d", [7], 2, 0)]


def test_only_the_prompt_or_only_the_completion_is_enough():
    rewards = Rewards({"p": lambda prompt: len(prompt), "c": lambda completion: len(completion)})
    assert rewards.score(["aa"], ["bbb"], {}).values.tolist() == [[2.0, 3.0]]


def test_log_metric_is_a_mean_over_samples_and_log_extra_takes_one_value():
    def my_reward(completion, log_metric, log_extra):
        log_metric("length", len(completion))
        if completion:
            log_extra("text", completion.upper())
        return 0.0

    scores = Rewards(my_reward).score(["p"] * 3, ["a", "", "bb"], {})
    assert scores.metrics == {"length": (3.0, 3)}
    assert scores.extras == {"text": ["A", None, "BB"]}


def test_log_extra_twice_for_one_completion_is_refused():
    def my_reward(completion, log_extra):
        log_extra("text", 1)
        log_extra("text", 2)

    with pytest.raises(RewardError, match="called twice for one completion"):
        Rewards(my_reward).score(["p"], ["c"], {})


def test_an_error_names_the_completion():
    def my_reward(completion):
        return 1 / (len(completion) - 3)

    with pytest.raises(RewardError) as error:
        Rewards(my_reward).score(["p"] * 3, ["a", "bb", "ccc"], {})
    for part in ("'my_reward'", "ZeroDivisionError", "completion 2", "'ccc'", "test_rewards_per_sample.py"):
        assert part in str(error.value)


def test_a_column_called_completion_is_refused_only_where_it_is_ambiguous():
    def takes_column(completions, completion):
        return [float(a == b) for a, b in zip(completions, completion)]

    rewards = Rewards(takes_column)
    rewards.bind(["completion"])
    assert rewards.score(["p", "p"], ["a", "b"], {"completion": ["a", "a"]}).total.tolist() == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"'alone'.*data\.rename=\{completion:"):
        Rewards(alone).bind(["completion", "answer"])
