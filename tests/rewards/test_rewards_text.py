"""Built-in rewards on plain text."""

from __future__ import annotations

import pytest

from lit_rl.errors import ConfigError, RewardError
from lit_rl.rewards import Length, RegexFormat, contains, exact_match, text_of


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


def test_contains_refuses_an_empty_answer():
    with pytest.raises(RewardError, match="answer 1 is empty"):
        contains([], ["a", "b"], ["a", " "])


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


def test_a_broken_pattern_is_a_config_error():
    with pytest.raises(ConfigError, match=r"pattern='\(' is not a regular expression"):
        RegexFormat("(")


def test_length_falls_in_a_straight_line():
    texts = ["x" * n for n in (0, 9, 10, 12, 15, 20, 1000)]
    assert Length(10)([], texts) == pytest.approx([1.0, 1.0, 1.0, 0.8, 0.5, 0.0, 0.0])
    for wrong in (0, -1):
        with pytest.raises(ConfigError, match="max_characters"):
            Length(wrong)


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
