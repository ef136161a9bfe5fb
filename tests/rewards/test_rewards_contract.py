"""What a reward function may take and must return (the questions of every issue tracker, one test each)."""

from __future__ import annotations

import functools
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from lit_rl.core.errors import RewardError
from lit_rl.rewards import CodeExecution, Rewards, Scores, TrainerState, math_answer
from lit_rl.rewards.contract import takes

PROMPTS = ["a", "a", "b", "b"]
COMPLETIONS = ["one", "two", "three", "four"]


def score(function, **columns) -> Scores:
    return Rewards(function).score(PROMPTS, COMPLETIONS, columns)


def returning(value):
    def my_reward(completions, **_):
        return value() if callable(value) else value

    return my_reward


GOOD = {
    "list": [1.0, 2.0, 3.0, 4.0],
    "tuple": (1.0, 2.0, 3.0, 4.0),
    "int": [1, 2, 3, 4],
    "fraction": [Fraction(1), Fraction(2), Fraction(3), Fraction(4)],
    "decimal": [Decimal(1), Decimal("2.0"), Decimal(3), Decimal("4.00")],
    "numpy": np.array([1.0, 2.0, 3.0, 4.0]),
    "numpy_integers": np.array([1, 2, 3, 4], dtype=np.int16),
    "list_of_numpy_scalars": [np.float32(1), np.int64(2), np.float64(3), np.array(4.0)],
    "torch": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "torch_bfloat16_with_gradient": torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16, requires_grad=True),
    "list_of_torch_scalars": [torch.tensor(float(i)) for i in range(1, 5)],
}


@pytest.mark.parametrize("returned", GOOD.values(), ids=GOOD.keys())
def test_these_returns_are_numbers(returned):
    values = score(returning(returned)).values
    assert values.dtype == torch.float32 and values.device.type == "cpu" and not values.requires_grad
    assert values.tolist() == [[1.0], [2.0], [3.0], [4.0]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_tensor_is_accepted():
    assert score(returning(torch.ones(4, device="cuda"))).values.device.type == "cpu"


@pytest.mark.parametrize("true", [True, np.True_, torch.tensor(True)], ids=["python", "numpy", "torch"])
def test_bool_is_zero_or_one(true):
    assert score(returning([true, False, true, False])).total.tolist() == [1.0, 0.0, 1.0, 0.0]


NUMPY_WITH_NONE = np.array([1.0, None, 3.0, 4.0], dtype=object)


@pytest.mark.parametrize("returned", [[1.0, None, 3.0, 4.0], NUMPY_WITH_NONE], ids=["list", "numpy"])
def test_none_is_nan_not_zero(returned):
    scores = score(returning(returned))
    assert scores.values[:, 0].isnan().tolist() == [False, True, False, False]
    assert scores.total.isnan().tolist() == [False, True, False, False]


BAD = {
    "scalar": (1.0, "1.0 (float)"),
    "none": (None, "None (NoneType)"),
    "string": ("1.0 ", "'1.0 ' (str)"),
    "four_letters": ("1234", "'1234' (str)"),
    "generator": (lambda: (1.0 for _ in range(4)), "list(...)"),
    "dict": ({"a": 1, "b": 1, "c": 1, "d": 1}, "(dict)"),
    "set": ({1.0, 2.0, 3.0, 4.0}, "(set)"),
    "one_value": ([1.0], "a list of 1 values starting with [1.0]"),
    "too_short": ([1.0, 2.0, 3.0], "a list of 3 values starting with [1.0, 2.0, 3.0]"),
    "too_long": ([9.0, 8.0, 7.0, 6.0, 5.0], "a list of 5 values starting with [9.0, 8.0, 7.0]"),
    "empty": ([], "a list of 0 values"),
    "numpy_2d": (np.ones((4, 1)), "a ndarray of shape (4, 1)"),
    "torch_2d": (torch.ones(4, 1), ".reshape(-1)"),
    "torch_2d_wide": (torch.ones(4, 4), "a Tensor of shape (4, 4)"),
    "torch_0d": (torch.tensor(1.0), "a Tensor of shape ()"),
    "torch_one_value": (torch.ones(1), "a Tensor of shape (1,)"),
}


def test_wrong_shapes_are_refused():
    for returned, told in BAD.values():
        with pytest.raises(RewardError) as error:
            score(returning(returned))
        for part in ("'my_reward'", told, "a list of 4 numbers or None"):
            assert part in str(error.value)


def never_awaited():
    async def value(): ...

    coroutine = value()
    coroutine.close()  # or Python warns of it
    return coroutine


BAD_ELEMENT = {
    "nan": (float("nan"), "not finite"),
    "inf": (float("inf"), "not finite"),
    "minus_inf": (float("-inf"), "not finite"),
    "numpy_nan": (np.float32("nan"), "not finite"),
    "torch_nan": (torch.tensor(float("nan")), "not finite"),
    "beyond_float32": (1e39, "not finite"),
    "beyond_float64": (10**400, "not finite"),
    "string": ("1.0", "is a str"),
    "nested": ([1.0], "is a list"),
    "dict": ({"score": 1.0}, "is a dict, not a number"),
    "dict_of_verl": ({"score": 1.0, "acc": True}, "return its score alone, and give the rest to log_metric"),
    "numpy_text": (np.str_("1.0"), "is a str"),
    "decimal_nan": (Decimal("sNaN"), "not finite"),
    "complex": (1j, "is a complex"),
    "torch_1d": (torch.ones(1), "is a Tensor"),
    "coroutine": (never_awaited(), "is a coroutine (await it, in an async def), not a number"),
}


def test_wrong_elements_are_refused_with_their_completion():
    for value, told in BAD_ELEMENT.values():
        with pytest.raises(RewardError) as error:
            Rewards(returning([0.0, 0.0, value])).score(["p"] * 3, ["one", "two", "x" * 70 + "y" * 70], {})
        for part in ("'my_reward'", told, "completion 2", "x" * 70 + "y" * 10):
            assert part in str(error.value)
        assert "y" * 11 not in str(error.value)


def test_large_values_warn_once_a_function():
    rewards = Rewards({"big": returning([0.0, -1e30, None, 0.0]), "fine": returning([1e6] * 4)})
    with pytest.warns(UserWarning, match=r"'big' returned a value of size 1e\+30") as caught:
        for _ in range(3):
            rewards.score(PROMPTS, COMPLETIONS, {})
    assert len(caught) == 1


def test_a_raising_function_is_named_and_chained():
    def my_reward(completions, **_):
        raise KeyError("gold")

    with pytest.raises(RewardError) as error:
        score(my_reward)
    for part in ("'my_reward'", "KeyError", "'gold'", "4 completions", "test_rewards_contract.py"):
        assert part in str(error.value)
    assert isinstance(error.value.__cause__, KeyError)


def test_sys_exit_is_a_reward_error_and_ctrl_c_is_not():
    def leaves(completions, **_):
        raise SystemExit(0)

    def interrupted(completions, **_):
        raise KeyboardInterrupt

    with pytest.raises(RewardError, match="SystemExit"):
        score(leaves)
    with pytest.raises(KeyboardInterrupt):
        score(interrupted)


def test_missing_column_fails_at_bind_with_what_there_is():
    def my_reward(prompts, completions, anwser):
        return [0.0] * len(completions)

    with pytest.raises(RewardError) as error:
        Rewards(my_reward).bind(["answer", "level"])
    for part in ("'my_reward'", "'anwser'", "answer, level", "Did you mean 'answer'?", "data.rename"):
        assert part in str(error.value)
    Rewards(my_reward).bind(["anwser"])


@pytest.mark.parametrize("argument", ["solution_str", "ground_truth", "queries"])
def test_arguments_of_other_libraries_are_answered_with_ours(argument):
    """Functions that were written for verl and OpenRLHF; renaming a column would not help."""
    made: dict[str, object] = {}
    exec(f"def theirs({argument}, extra_info=None): ...", made)
    with pytest.raises(RewardError, match=f"{argument}.*In (verl|OpenRLHF)") as error:
        Rewards(made["theirs"]).bind(["answer"])
    assert "data.rename" not in str(error.value)


def test_functions_get_only_what_they_name():
    def only_completions(completions):
        return [1.0] * len(completions)

    def with_default(completions, level=7, missing=7):
        assert (level, missing) == ([1, 2, 3, 4], 7)
        return [1.0] * len(completions)

    def everything(**kwargs):
        assert set(kwargs) == {
            *("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"),
            *("level", "answer"),
        }
        return [1.0] * 4

    rewards = Rewards([only_completions, with_default, everything])
    rewards.bind(["level", "answer"])
    assert (
        rewards.score(PROMPTS, COMPLETIONS, {"level": [1, 2, 3, 4], "answer": list("abcd")}).total.tolist() == [3.0] * 4
    )


def test_partials_methods_and_wrapped_functions_bind():
    def base(completions, answer, bonus):
        return [bonus] * len(completions)

    class Judge:
        def rate(self, completions, answer):
            return [1.0] * len(completions)

        def __call__(self, completions, answer):
            return [2.0] * len(completions)

    @functools.wraps(base)
    def wrapped(*args, **kwargs):
        return base(*args, **kwargs)

    rewards = Rewards([functools.partial(base, bonus=0.5), Judge().rate, Judge()])
    assert rewards.names == ("base", "rate", "judge")
    assert rewards.score(PROMPTS, COMPLETIONS, {"answer": PROMPTS}).values[0].tolist() == [0.5, 1.0, 2.0]
    with pytest.raises(RewardError, match="'bonus'"):
        Rewards(wrapped).bind(["answer"])


def test_inputs_are_copies():
    def vandal(prompts, completions, completion_ids, tags):
        prompts[0][0]["content"] = "changed"
        assert prompts[1][0]["content"] == "q"  # one object in, two copies out
        completions[0][0]["content"] = "changed"
        completions.clear()
        completion_ids[0].append(99)
        tags[0]["x"] = 2
        return [0.0, 0.0]

    def witness(prompts, completions, completion_ids, tags):
        assert prompts[0][0]["content"] == "q" and completions[0][0]["content"] == "c"
        assert completion_ids == [[1], [2]] and tags[0] == {"x": 1}
        return [1.0, 1.0]

    prompt = [{"role": "user", "content": "q"}]
    completions = [[{"role": "assistant", "content": "c"}], [{"role": "assistant", "content": "d"}]]
    columns, ids = {"tags": [{"x": 1}, {"x": 1}]}, [[1], [2]]
    rewards = Rewards([vandal, witness])
    assert rewards.score([prompt, prompt], completions, columns, completion_ids=ids).total.tolist() == [1.0, 1.0]
    assert prompt[0]["content"] == "q" and completions[0][0]["content"] == "c"
    assert ids == [[1], [2]] and columns == {"tags": [{"x": 1}, {"x": 1}]}


def test_trainer_state_is_read_only():
    def my_reward(completions, trainer_state):
        assert (trainer_state.step, trainer_state.max_steps, trainer_state.epoch) == (3, 10, 1)
        assert trainer_state.global_step == 3
        trainer_state.step = 0
        return [0.0] * 4

    with pytest.raises(RewardError, match="FrozenInstanceError"):
        Rewards(my_reward).score(PROMPTS, COMPLETIONS, {}, trainer_state=TrainerState(3, 10, 1))


def test_columns_of_another_length_are_refused():
    with pytest.raises(RewardError, match="3 values of 'answer' for 4"):
        score(returning([0.0] * 4), answer=[1, 2, 3])


def test_log_metric_is_a_sum_with_its_count_and_log_extra_a_column():
    def one(completions, log_metric, log_extra):
        log_metric("tried", 1.0)
        log_metric("tried", torch.tensor(3))
        log_extra("found", np.array([1, 2, 3, 4]))
        return [0.0] * 4

    def two(completions, log_metric):
        log_metric("asked", True)
        log_metric("rate", Decimal("0.5"))
        return [0.0] * 4

    scores = Rewards([one, two]).score(PROMPTS, COMPLETIONS, {})
    assert scores.metrics == {"tried": (4.0, 2), "asked": (1.0, 1), "rate": (0.5, 1)} and scores.extras == {
        "found": [1, 2, 3, 4]
    }
    assert Rewards(two).score(PROMPTS, COMPLETIONS, {}).extras == {}  # nothing stays from an earlier batch


MISLOGGED = {
    "metric_nan": (lambda metric, extra: metric("m", float("nan")), "finite number"),
    "metric_text": (lambda metric, extra: metric("m", "1"), "finite number"),
    "metric_list": (lambda metric, extra: metric("m", [1.0]), r"one finite number.*log_extra"),
    "metric_array": (lambda metric, extra: metric("m", np.ones(4)), r"one finite number.*log_extra"),
    "metric_dict": (lambda metric, extra: metric("m", {"a": 1.0}), "one finite number"),
    "metric_none": (lambda metric, extra: metric("m", None), "one finite number"),
    "metric_infinite": (lambda metric, extra: metric("m", Decimal("Infinity")), "finite number"),
    "extra_short": (
        lambda metric, extra: extra("e", [1]),
        r"got a list of 1 .* expected a list with one value per completion \(4\)",
    ),
    "extra_text": (lambda metric, extra: extra("e", "1234"), r"expected a list with one value per completion \(4\)"),
    "extra_twice": (lambda metric, extra: (extra("e", [1] * 4), extra("e", [1] * 4)), "called twice"),
}


def test_wrong_logging_is_refused():
    for log, told in MISLOGGED.values():

        def my_reward(completions, log_metric, log_extra, log=log):
            log(log_metric, log_extra)
            return [0.0] * 4

        with pytest.raises(RewardError, match=told):
            score(functools.partial(my_reward))


def test_who_may_log_is_who_names_it_or_takes_all_that_there_is() -> None:
    """A function of lit_rl passes columns on: it was called late, and every monitor was waited for."""

    def batch(completions, **columns): ...

    def passing(completions, **_): ...

    def naming(completions, log_metric, **_): ...

    assert [takes("f", each, "log_metric") for each in (batch, functools.partial(batch), naming)] == [True] * 3
    ours = (passing, CodeExecution(allow_execution=True), math_answer)
    assert [takes("f", each, "log_metric") for each in ours] == [False] * 3
