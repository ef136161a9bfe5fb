"""Built-in rewards on plain text."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from lit_rl.core.errors import RewardError
from lit_rl.rewards import (
    CosineScaledLength,
    Length,
    MathAccuracy,
    RegexFormat,
    RewardRecipes,
    Rewards,
    contains,
    exact_match,
    load_function,
    math_answer,
    text_of,
)
from lit_rl.rewards.text_rewards import answer_text


def message(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("wrap", [str, message], ids=["text", "messages"])
def test_each_built_in_reads_text_and_messages(wrap):
    completions = [wrap(" 42\n"), wrap("it is 42"), wrap("")]
    answers = ["42", 42, 42.0]
    assert exact_match([], completions, answers) == [1.0, 0.0, 0.0]
    assert contains([], completions, answers) == [1.0, 1.0, 0.0]
    assert RegexFormat(r"\s*\d+\s*")([], completions) == [1.0, 0.0, 0.0]
    assert Length(4)([], completions) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("reward", [exact_match, contains])
def test_answers_are_text_numbers_or_none(reward):
    assert reward([], ["7", "7", "7.5", "-3", "", "7"], [7, 7.0, 7.5, " -3 ", None, 8]) == [1, 1, 1, 1, None, 0]
    with pytest.raises(RewardError, match="list"):
        reward([], ["7"], [["7", "8"]])


MATH = pytest.param(math_answer, id="math_answer")
COMPARE = [exact_match, contains, MATH]


MISSING = [None, float("nan"), np.float32("nan"), Decimal("NaN"), torch.tensor(torch.nan)]


@pytest.mark.parametrize("reward", [*COMPARE, MathAccuracy()])
@pytest.mark.parametrize("missing", MISSING, ids=repr)
def test_a_missing_answer_is_no_answer(reward, missing):
    completions = [r"\boxed{nan}", "nan", "None", ""]
    assert reward([], completions, [missing] * 4) == [None] * 4
    by_length = CosineScaledLength(reward, 8)
    assert by_length([[]] * 4, prompts=[], completions=completions, answer=[missing] * 4) == [None] * 4


NUMBERS = [
    5,
    5.0,
    np.int64(5),
    np.float16(5),
    np.array(5),
    torch.tensor(5),
    Decimal("5.00"),
    Fraction(10, 2),
    "5",
    " 5 ",
]


@pytest.mark.parametrize("reward", COMPARE)
@pytest.mark.parametrize("answer", NUMBERS, ids=repr)
def test_a_number_of_any_type_is_an_answer(reward, answer):
    assert reward([], ["5", "6"], [answer] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (np.float32(0.1), "0.1"),
        (Decimal("2.50"), "2.5"),
        (1e-7, "0.0000001"),
        (-0.5, "-0.5"),
        (True, "True"),
        (np.True_, "True"),
        (np.str_(" a "), "a"),
        (float("inf"), "inf"),
        (10**30, "1" + "0" * 30),
    ],
    ids=repr,
)
def test_a_number_reads_as_one_would_write_it(answer, text):
    assert answer_text(answer) == text


def test_empty_answers_are_found_before_a_run_and_only_where_they_are_compared():
    columns = {"answer": ["3", "", None, " "], "source": ["a", "a", "a", "b"]}
    for reward in (exact_match, contains, math_answer, load_function("lit_rl.rewards:exact_match")):
        with pytest.raises(RewardError, match="empty in 2 of 4 rows, the first of which is row 1"):
            Rewards({"right": reward}).check(columns)
    with pytest.raises(RewardError, match="empty in 2 of 4 rows"):
        Rewards({"cosine": CosineScaledLength(exact_match, 8)}).check(columns)
    by_source = {"a": {"other": 1.0}, "b": {"right": 1.0}}
    other = {"right": exact_match, "other": RegexFormat()}
    with pytest.raises(RewardError, match="empty in 1 of 1 rows"):
        RewardRecipes(other, by_source).check(columns)
    RewardRecipes(other, {"b": {"other": 1.0}, "a": {"right": 1.0}}).check({**columns, "answer": ["3", "4", None, ""]})
    Rewards({"right": exact_match}).check({"answer": ["3", None]})


FORMATS = {
    "<think>a\nb</think><answer>5</answer>": 1.0,
    "\n<think></think>\n\n<answer></answer>\n": 1.0,
    "<think>1 < 2 and <b>x</b></think> <answer>5</answer>": 1.0,
    "so: <think>a</think><answer>5</answer>": 0.0,
    "<think>a</think><answer>5</answer> done": 0.0,
    "<think>a</think> so <answer>5</answer>": 0.0,
    "<answer>5</answer><think>a</think>": 0.0,
    "<think>a</think><answer>5": 0.0,
    "<think>a</think><answer>5</answer><answer>6</answer>": 0.0,
    "<think><think>a</think></think><answer>5</answer>": 0.0,
    "": 0.0,
}


@pytest.mark.parametrize(("completion", "expected"), FORMATS.items())
def test_the_default_format_is_one_think_and_one_answer_block(completion, expected):
    assert RegexFormat()([], [completion]) == [expected]


def test_the_default_format_is_linear_in_the_length():
    assert RegexFormat()([], ["<think>" * 20_000, "<think>" + "a<" * 50_000]) == [0.0, 0.0]


def test_length_falls_in_a_straight_line():
    texts = ["x" * n for n in (0, 9, 10, 12, 15, 20, 1000)]
    assert Length(10)([], texts) == pytest.approx([1.0, 1.0, 1.0, 0.8, 0.5, 0.0, 0.0])


def test_text_of_every_kind_of_message():
    assert text_of("x") == "x"
    assert text_of([*message("a"), *message("b")]) == "a\nb"
    assert text_of(message([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}])) == "ab"
    assert text_of([{"role": "assistant", "content": None, "tool_calls": []}]) == ""
    episode = [*message("a"), {"role": "tool", "content": "the answer is b"}, {"role": "user", "content": "c"}]
    assert text_of([*episode, *message("d")]) == "a\nd", "what others wrote earns nothing"
    for wrong in (3, None, {"content": "a"}, ["a"], message(3)):
        with pytest.raises(RewardError):
            text_of(wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("reward", [exact_match, contains, math_answer])
@pytest.mark.parametrize(("answers", "rows"), [(["1", None, float("nan")], 2), (["1", "2"], 0), ([None], 1)])
def test_rows_without_an_answer_are_counted_before_a_run(reward, answers, rows, recwarn):
    Rewards(reward).check({"answer": answers, "other": [None] * len(answers)})
    lines = [str(each.message) for each in recwarn]
    assert len(lines) == bool(rows)
    assert all(f"holds nothing in {rows} of {len(answers)} rows" in line for line in lines)
