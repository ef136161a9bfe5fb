"""Rows 36, 39, 40, 41 and 43 of the list of bad inputs, one row at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lit_rl.core.errors import DataError
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


def test_a_missing_prompt_names_the_columns_and_the_key():
    with pytest.raises(
        DataError, match=r"f:7: no column 'prompt'; columns found: promt, answer.*data\.prompt_key.*'promt'"
    ):
        split_prompt({"promt": "x", "answer": "y"}, "f:7")


def test_text_parts_are_joined_and_absent_keys_of_tables_are_dropped():
    parts = [{"type": "text", "text": "a ", "image": None}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": None, "tool_calls": None}
    assert split_prompt({"prompt": [message]}, "f:1")[0] == [{"role": "user", "content": "a b"}]


def test_an_assistant_that_calls_a_tool_may_say_nothing():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    prompt, _ = split_prompt({"prompt": [USER, call, {"role": "tool", "content": "7"}]}, "f:1")
    assert prompt[1] == {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


BAD: dict[str, tuple[Any, str]] = {
    "number": (7, r"f:7: the prompt is 7 \(int\); allowed are a string or a list"),
    "none": (None, "NoneType"),
    "object": ({"role": "user", "content": "x"}, "dict"),
    "empty list": ([], "f:7: the prompt is an empty list"),
    "unknown role": ([{"role": "users", "content": "x"}], "f:7: message 0 has the role 'users'.*Did you mean 'user'"),
    "role of a list": ([{"role": ["user"], "content": "x"}], "has the role"),
    "content none": ([USER, {"role": "user", "content": None}], "f:7: message 1 has the content None"),
    "content number": ([{"role": "user", "content": 3}], "has the content 3"),
    "no role": (
        [{"from": "human", "value": "x"}],
        "f:7: message 0 needs the keys role and content; found keys from, value",
    ),
    "no message": (["x"], "f:7: message 0 needs the keys"),
    "assistant last": ([USER, {"role": "assistant", "content": "x"}], "f:7: the last message is the assistant's"),
    "image part": ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "f:7: message 0.*neither text"),
    "text part without text": ([{"role": "user", "content": [{"type": "text"}]}], "neither text nor images"),
    "calls of text": (
        [{"role": "assistant", "content": "", "tool_calls": "f(1)"}, USER],
        r"message 0 has the tool call 'f\(1\)'",
    ),
    "call of text": (
        [{"role": "assistant", "content": "", "tool_calls": ["f"]}, USER],
        "message 0 has the tool call 'f'",
    ),
    "call without a name": (
        [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"arguments": {}}}]},
            USER,
        ],
        r"f:7: message 0 has the tool call {'type.*is a list of calls such as {\"type",
    ),
    "NUL": ("a\0b", "f:7 holds a NUL"),
    "NUL in a message": ([{"role": "user", "content": "a\0b"}], "f:7: message 0 holds a NUL"),
    "surrogate": ("a\ud83d", "surrogate"),
}


@pytest.mark.parametrize("prompt, message", BAD.values(), ids=list(BAD))
def test_a_bad_prompt_is_refused_with_its_row(prompt, message):
    with pytest.raises(DataError, match=message):
        split_prompt({"prompt": prompt}, "f:7")


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


def test_columns_are_renamed_and_never_merged():
    assert rename_columns({"q": 1, "a": 2}, "f:1", {"q": "prompt", "absent": "x"}) == {"prompt": 1, "a": 2}
    assert rename_columns({"a": 1, "b": 2}, "f:1", {"a": "b", "b": "a"}) == {"b": 1, "a": 2}
    with pytest.raises(DataError, match=r"f:1: data\.rename gives the row two columns named 'b'"):
        rename_columns({"a": 1, "b": 2}, "f:1", {"a": "b"})
