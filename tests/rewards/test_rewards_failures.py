"""Failure policy, cache, limits that cannot kill, and values that never change."""

from __future__ import annotations

import copy
import functools
import json
import textwrap
import time
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.core.errors import BackendError, ConfigError, DataError, RewardError, StorageError
from lit_rl.rewards import Rewards, caller
from lit_rl.rewards.caller import ScoreCache, key_of

COMPLETIONS = ["1", "x", "3", "", "5"]


def batch(completions, log_metric, log_extra):
    log_metric("tried", len(completions))
    numbers = [float(completion) for completion in completions]
    log_extra("number", numbers)
    return numbers


def single(completion, log_metric, log_extra):
    log_metric("tried", 1)
    log_extra("number", float(completion))
    return float(completion)


async def batch_async(completions, log_metric, log_extra):
    return batch(completions, log_metric, log_extra)


async def single_async(completion, log_metric, log_extra):
    return single(completion, log_metric, log_extra)


FUNCTIONS = [batch, single, batch_async, single_async]


def score(rewards, completions=COMPLETIONS):
    return rewards.score(["p"] * len(completions), completions, {})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_with_a_score_for_failures_only_the_failing_ones_get_it(function):
    with pytest.warns(UserWarning, match="failed on 2 of 5 .*ValueError.*starts 'x'"):
        scores = score(Rewards({"f": function}, on_error=-1))
    assert scores.total.tolist() == [1.0, -1.0, 3.0, -1.0, 5.0]
    assert scores.metrics["rewards/f/failure_ratio"] == (2.0, 5)
    assert scores.metrics["rewards/f/timeout_ratio"] == (0.0, 5)
    assert scores.extras == {"number": [1.0, None, 3.0, None, 5.0]}


@pytest.mark.parametrize("kind", [StorageError, BackendError, DataError])
def test_an_error_of_ours_keeps_its_class_and_so_its_exit_code(kind):
    def my_reward(completions):
        raise kind("the file is damaged")

    with pytest.raises(kind, match=rf"'my_reward' raised {kind.__name__} .*the file is damaged") as error:
        score(Rewards(my_reward))
    assert type(error.value) is kind
    with pytest.warns(UserWarning, match=kind.__name__):
        assert score(Rewards(my_reward, on_error=0.0)).total.tolist() == [0.0] * 5


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_setting_that_is_wrong_is_no_failure_to_be_scored(function, monkeypatch):
    def refuse(number):
        raise ConfigError(f"precision={number!r} is unknown")

    monkeypatch.setitem(globals(), "float", refuse)
    with pytest.raises(ConfigError, match="precision='1' is unknown"):
        score(Rewards(function, on_error=0.0))


def test_nothing_is_counted_where_failures_end_the_run():
    assert score(Rewards(single), ["1"]).metrics == {"tried": (1.0, 1)}


def test_a_failed_call_leaves_nothing_in_the_log():
    """The batch is scored again, one by one: what the failed call logged is not counted twice."""
    with pytest.warns(UserWarning):
        scores = score(Rewards({"f": batch}, on_error=0.0), ["1", "x", "3"])
    assert scores.metrics["tried"] == (2.0, 2)


def test_a_function_that_changes_its_inputs_before_it_fails_gets_fresh_ones():
    def my_reward(completions):
        taken = completions.pop()
        return [*([1.0] * len(completions)), float(taken)]

    with pytest.warns(UserWarning):
        assert score(Rewards(my_reward, on_error=0.0), ["x", "y", "z"]).total.tolist() == [0.0, 0.0, 0.0]
    with pytest.warns(UserWarning):
        assert score(Rewards(my_reward, on_error=0.0), ["1", "2", "z"]).total.tolist() == [1.0, 2.0, 0.0]


def test_each_kind_of_failure_warns_once():
    def my_reward(completion):
        raise (KeyError if completion == "k" else ValueError)(completion)

    rewards = Rewards(my_reward, on_error=0.0)
    with pytest.warns(UserWarning) as caught:
        score(rewards, ["v", "k"])
        score(rewards, ["v", "k"])
    assert sorted("KeyError" in str(warning.message) for warning in caught) == [False, True]


def test_a_hanging_coroutine_is_a_failure_of_its_own_completion():
    import asyncio

    async def my_reward(completion):
        await asyncio.sleep(600 if completion == "x" else 0)
        return 1.0

    with pytest.warns(UserWarning, match="TimeoutError"):
        scores = score(Rewards({"f": my_reward}, on_error=0.0, timeout=0.5))
    assert scores.total.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert scores.metrics["rewards/f/timeout_ratio"] == (1.0, 5)


def test_after_so_many_hangs_the_rest_of_the_batch_is_not_tried(monkeypatch):
    import asyncio

    tried = []

    async def my_reward(completions):
        tried.append(len(completions))
        await asyncio.sleep(600)

    monkeypatch.setattr(caller, "MAX_HANGS", 2)
    with pytest.warns(UserWarning, match="TimeoutError"):
        scores = score(Rewards({"f": my_reward}, on_error=0.0, timeout=0.05, max_concurrent=1))
    assert tried == [5, 1, 1]
    assert scores.metrics["rewards/f/timeout_ratio"] == (5.0, 5)


def test_a_slow_callable_in_this_process_is_reported_and_waited_for():
    def my_reward(completions):
        until = time.monotonic() + 60
        while not caught and time.monotonic() < until:
            time.sleep(0.01)
        return [1.0] * len(completions)

    with pytest.warns(UserWarning, match="'my_reward' .* timeout=0.05") as caught:
        assert score(Rewards(my_reward, timeout=0.05)).total.tolist() == [1.0] * 5


# ---------------------------------------------------------------------- cache


def counting():
    seen = []

    def my_reward(prompts, completions, answer, log_extra):
        seen.extend(completions)
        log_extra("seen", completions)
        return [None if c == "n" else len(c) + a for c, a in zip(completions, answer)]

    return my_reward, seen


ROWS = st.lists(st.tuples(st.sampled_from("abn"), st.sampled_from(["x", "yy", "n"]), st.integers(0, 2)), max_size=8)


@given(st.lists(ROWS, max_size=4), st.integers(1, 5))
def test_a_cache_of_any_size_changes_no_value(batches, size):
    cached, plain = Rewards(counting()[0], cache=size), Rewards(counting()[0])
    for rows in batches:
        inputs = [row[0] for row in rows], [row[1] for row in rows], {"answer": [row[2] for row in rows]}
        one, two = cached.score(*inputs), plain.score(*inputs)
        assert one.values.nan_to_num(-7).tolist() == two.values.nan_to_num(-7).tolist()
        assert one.extras == two.extras or not rows


def test_only_what_is_new_is_asked_for_and_hits_are_counted():
    function, seen = counting()
    rewards = Rewards({"f": function}, cache=10)
    prompts, answer = ["p", "p", "q", "p"], {"answer": [1, 1, 1, 2]}
    first = rewards.score(prompts, ["a", "a", "a", "a"], answer)
    assert len(seen) == 3 and first.metrics["rewards/f/cache_hit_ratio"] == (1.0, 4)
    second = rewards.score(prompts, ["a", "b", "a", "a"], answer)
    assert len(seen) == 4 and second.metrics["rewards/f/cache_hit_ratio"] == (3.0, 4)


def test_failures_are_not_kept():
    tried = []

    def my_reward(completion):
        tried.append(completion)
        raise ValueError

    rewards = Rewards(my_reward, cache=10, on_error=0.0)
    with pytest.warns(UserWarning):
        score(rewards, ["a"])
        score(rewards, ["a"])
    assert tried == ["a", "a"]


def test_wrong_values_behind_the_cache_name_their_place_in_the_batch():
    rewards = Rewards({"f": lambda completions: [float("nan") if c == "bad" else 0.0 for c in completions]}, cache=9)
    score(rewards, ["a", "b"])
    with pytest.raises(RewardError, match="completion 2.*starts 'bad'"):
        score(rewards, ["a", "b", "bad"])


def test_behind_the_cache_a_metric_is_of_new_completions_and_a_column_of_all():
    def my_reward(completion, log_metric, log_extra):
        log_metric("length", len(completion))
        log_extra("characters", len(completion))
        return 1.0

    rewards = Rewards(my_reward, cache=10)
    score(rewards, ["a", "bb"])
    scores = score(rewards, ["a", "bb", "cccc"])
    assert scores.metrics["length"] == (4.0, 1) and scores.extras == {"characters": [1, 2, 4]}


def test_a_function_of_the_trainer_state_is_not_cached():
    def my_reward(completions, trainer_state): ...

    with pytest.raises(ConfigError, match=r"reward\.cache=5.*'my_reward' takes trainer_state"):
        Rewards(my_reward, cache=5).bind([])


def test_the_longest_unused_entry_goes_first():
    cache = ScoreCache(2)
    for key in (b"a", b"b"):
        cache.put(key, key)
    assert cache.get(b"a") == b"a"
    cache.put(b"c", b"c")
    assert [cache.get(key) for key in (b"a", b"b", b"c")] == [b"a", None, b"c"] and len(cache) == 2


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=5,
)


@given(PLAIN, PLAIN)
def test_keys_are_equal_exactly_where_inputs_are(one, two):
    assert key_of({"x": one}) == key_of({"x": copy.deepcopy(one)})
    assert (key_of({"x": one}) == key_of({"x": two})) == (repr_sorted(one) == repr_sorted(two))


def repr_sorted(value):
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{repr_sorted(value[key])}" for key in sorted(value)) + "}"
    return "[" + ",".join(map(repr_sorted, value)) + "]" if isinstance(value, list) else repr(value)


# ---------------------------------------------------------------------- always the same value


def always(values):
    remaining = iter(values)

    def my_reward(completions):
        value = next(remaining)
        return [value] * len(completions) if not isinstance(value, list) else value

    return my_reward


def test_fifty_batches_of_one_value_warn_once_with_a_sample():
    rewards = Rewards(always([0.0] * 120))
    with pytest.warns(UserWarning, match="'my_reward' returned 0 .* 50 batches.*'a'") as caught:
        for _ in range(120):
            score(rewards, ["a"])
    assert len(caught) == 1


@pytest.mark.parametrize(
    "values",
    [[0.0] * 49 + [1.0] * 49, ([0.0] * 49 + [[0.0, 1.0]]) * 2, [None] * 120],
    ids=["another_value", "some_spread", "does_not_apply"],
)
def test_other_rewards_do_not_warn(values):
    rewards = Rewards(always(values))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in values:
            score(rewards, ["a", "b"])


def test_a_limit_ends_the_run():
    rewards = Rewards(always([0.5, None, 0.5, 0.5]), constant_limit=3)
    for _ in range(3):
        score(rewards)
    with pytest.raises(RewardError, match=r"returned 0.5 .*reward.constant_limit=3"):
        score(rewards)


def misuses_extra(completions, log_extra):
    log_extra("a", 1)


def misuses_metric(completions, log_metric):
    log_metric({"a": 1})


def misuses_per_sample(completion, log_extra):
    log_extra("a")


def misuses_a_library(completions):
    return [json.loads("x") for _ in completions]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (misuses_extra, "log_extra('a', ...) got 1 (int), expected a list with one value per completion (2)"),
        (misuses_metric, "log_metric() missing 1 required positional argument: 'value'"),
        (misuses_per_sample, "log_extra() missing 1 required positional argument: 'value'"),
        (misuses_a_library, "raised JSONDecodeError"),
    ],
)
def test_the_line_of_a_failure_is_the_users_own(function, told):
    with pytest.raises(RewardError) as error:
        Rewards(function).score(["a", "b"], ["x", "y"], {})
    line = function.__code__.co_firstlineno + 1
    assert told in str(error.value)
    assert f"(line {line} of {__file__})" in str(error.value)


def test_what_no_line_of_the_users_raised_names_the_line_of_its_own_library():
    with pytest.raises(RewardError, match=r"line \d+ of .*textwrap\.py"):
        Rewards(functools.partial(textwrap.fill, width=0)).score(["a"], ["x"], {"text": ["a b"]})


def test_a_method_without_its_object_says_so():
    class Scorer:
        def score(self, completions):
            return [0.0 for _ in completions]

    with pytest.raises(RewardError, match="This is a method without its object"):
        Rewards(Scorer.score).score(["a"], ["x"], {})
