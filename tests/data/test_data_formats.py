"""Prompts, one row at a time. What is no prompt: `tests/cli/refusals.yaml`."""

from __future__ import annotations

import copy

import pytest

from lit_rl.data.rows import add_system_prompt, is_blank, rename_columns, split_prompt

USER = {"role": "user", "content": "hi"}


def test_a_text_and_messages_come_back_with_the_other_columns():
    assert split_prompt({"prompt": " hi\n", "answer": 3}, "f:1") == (" hi\n", {"answer": 3})
    assert split_prompt({"q": [USER], "prompt": "kept"}, "f:1", prompt_key="q") == ([USER], {"prompt": "kept"})


def test_the_row_is_not_changed():
    row = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}], "x": [1]}
    before = copy.deepcopy(row)
    split_prompt(row, "f:1")
    assert row == before


def test_text_parts_are_joined_and_absent_keys_of_tables_are_dropped():
    parts = [{"type": "text", "text": "a ", "image": None}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": None, "tool_calls": None}
    assert split_prompt({"prompt": [message]}, "f:1")[0] == [{"role": "user", "content": "a b"}]


def test_an_assistant_that_calls_a_tool_may_say_nothing():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    prompt, _ = split_prompt({"prompt": [USER, call, {"role": "tool", "content": "7"}]}, "f:1")
    assert prompt[1] == {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    "text", ["\U0001f600", "\u05e9\u05dc\u05d5\u05dd", "e\u0301", "\x1b[31m", "<script>", "<|im_end|>"]
)
def test_text_is_preserved(text):
    assert split_prompt({"prompt": text}, "f:1")[0] == text
    assert split_prompt({"prompt": [{"role": "user", "content": text}]}, "f:1")[0][0]["content"] == text


def test_a_system_prompt_opens_messages_that_have_none():
    system = {"role": "system", "content": "S"}
    own = {"role": "system", "content": "own"}
    assert add_system_prompt("hi", "S") == [system, USER]
    assert add_system_prompt([USER], "S") == [system, USER]
    assert add_system_prompt([own, USER], "S") == [own, USER]
    assert add_system_prompt("hi", None) == "hi"


@pytest.mark.parametrize(
    "prompt, empty",
    [
        ("", True),
        (" \n\u2003", True),
        ("x", False),
        ([{"role": "user", "content": " "}], True),
        ([{"role": "system", "content": "S"}, {"role": "user", "content": ""}], True),
        ([{"role": "system", "content": "S"}], True),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": ""}], False),
    ],
)
def test_empty_means_nothing_is_asked(prompt, empty):
    assert is_blank(prompt) is empty


def test_columns_are_renamed():
    assert rename_columns({"q": 1, "a": 2}, "f:1", {"q": "prompt", "absent": "x"}) == {"prompt": 1, "a": 2}
    assert rename_columns({"a": 1, "b": 2}, "f:1", {"a": "b", "b": "a"}) == {"b": 1, "a": 2}
