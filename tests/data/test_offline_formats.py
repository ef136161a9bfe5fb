"""Formats are recognised from the columns, checked, and brought into one form; every refusal names row and column."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from trl.data_utils import extract_prompt

from lit_rl.core.errors import DataError
from lit_rl.data.example_formats import check_conversation, read_record, shared_messages, shared_text
from lit_rl.data.rows import is_blank


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


ASK, YES, NO = [user("hi")], [assistant("yes")], [assistant("no")]


@pytest.mark.parametrize(
    "kind, row, name, prompt, completions",
    [
        ("texts", {"text": "a"}, "language modelling (text)", None, ("a",)),
        ("texts", {"messages": ASK + YES}, "language modelling (messages)", ASK, (YES,)),
        ("texts", {"messages": YES}, "language modelling (messages)", None, (YES,)),
        ("texts", {"prompt": "a", "completion": "b"}, "prompt-completion (text)", "a", ("b",)),
        ("texts", {"prompt": ASK, "completion": YES}, "prompt-completion (messages)", ASK, (YES,)),
        ("texts", {"prompt": "hi", "completion": YES}, "prompt-completion (messages)", ASK, (YES,)),
        ("texts", {"prompt": ASK, "completion": "yes"}, "prompt-completion (messages)", ASK, (YES,)),
        ("texts", {"prompt": "p", "messages": ASK + YES}, "language modelling (messages)", ASK, (YES,)),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c"}, "preference (text)", "a", ("b", "c")),
        ("pairs", {"prompt": ASK, "chosen": YES, "rejected": NO}, "preference (messages)", ASK, (YES, NO)),
        ("pairs", {"prompt": ASK, "chosen": ASK + YES, "rejected": ASK + NO}, "preference (messages)", ASK, (YES, NO)),
        (
            "pairs",
            {"chosen": "Sky is blue", "rejected": "Sky is black"},
            "preference with implicit prompt (text)",
            "Sky is",
            (" blue", " black"),
        ),
        (
            "pairs",
            {"chosen": ASK + YES, "rejected": ASK + NO},
            "preference with implicit prompt (messages)",
            ASK,
            (YES, NO),
        ),
        (
            "pairs",
            {"prompt": "hi", "chosen": ASK + YES, "rejected": ASK + NO, "messages": ASK + YES},
            "preference with implicit prompt (messages)",
            ASK,
            (YES, NO),
        ),
        (
            "verdicts",
            {"prompt": "a", "completion": "b", "label": True},
            "unpaired preference (text)",
            "a",
            ("b",),
        ),
        ("verdicts", {"prompt": "a", "chosen": "b", "rejected": "c"}, "preference (text)", "a", ("b", "c")),
        (
            "triples",
            {"prompt": "a", "chosen": "b", "rejected": "c", "reference": "d"},
            "triple preference (text)",
            "a",
            ("b", "c", "d"),
        ),
        (
            "triples",
            {"chosen": "A: b", "rejected": "A: c", "reference": "A: d"},
            "triple preference with implicit prompt (text)",
            "A:",
            (" b", " c", " d"),
        ),
        (
            "triples",
            {"chosen": ASK + YES, "rejected": ASK + NO, "reference": ASK + NO},
            "triple preference with implicit prompt (messages)",
            ASK,
            (YES, NO, NO),
        ),
        (
            "stepwise",
            {"prompt": "a", "completions": ["b", "c"], "labels": [True, False]},
            "stepwise (text)",
            "a",
            ("b", "c"),
        ),
    ],
)
def test_formats(kind, row, name, prompt, completions):
    record = read_record({**row, "extra": 1, "empty": None}, "f[0]", kind)
    assert (record.format, record.prompt, record.completions) == (name, prompt, completions)
    assert record.columns["extra"] == 1 and record.columns["empty"] is None
    assert not {"prompt", "chosen", "rejected", "completion", "completions"} & set(record.columns)


def test_a_system_prompt_makes_messages_of_strings():
    record = read_record({"prompt": "a", "chosen": "b", "rejected": "c"}, "f", "pairs", system_prompt="S")
    system = {"role": "system", "content": "S"}
    assert record.prompt == [system, user("a")]
    assert record.completions == ([assistant("b")], [assistant("c")])
    implicit = read_record({"chosen": "A: b", "rejected": "A: c"}, "f", "pairs", system_prompt="S")
    assert implicit.prompt == [system, user("A:")] and implicit.completions == ([assistant(" b")], [assistant(" c")])
    own = [{"role": "system", "content": "own"}, *ASK]
    assert read_record({"messages": own + YES}, "f", "texts", system_prompt="S").prompt == own
    assert read_record({"messages": ASK + YES}, "f", "texts", system_prompt="S").prompt == [system, *ASK]
    with pytest.raises(DataError, match=r"f: data\.system_prompt has no place"):
        read_record({"text": "a"}, "f", "texts", system_prompt="S")


def test_what_tables_do_to_values_is_undone():
    assert [
        read_record({"prompt": "a", "completion": "b", "label": label}, "f", "verdicts").desirable
        for label in (True, 1, 1.0, "true", "TRUE", "1", False, 0, "false", "0")
    ] == [True] * 6 + [False] * 4
    tools = '[{"name": "f", "parameters": null, "more": {"a": null, "b": 1}}]'
    record = read_record({"messages": ASK + YES, "tools": tools}, "f", "texts")
    assert record.tools == record.columns["tools"] == [{"name": "f", "more": {"b": 1}}]
    assert read_record({"messages": ASK + YES, "tools": []}, "f", "texts").tools is None
    filled = [{"role": "user", "content": [{"type": "text", "text": "hi"}], "tool_calls": None}]
    assert read_record({"messages": filled + YES}, "f", "texts").prompt == ASK


def test_margins_are_finite_numbers_of_pairs():
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert [read_record({**row, "margin": m}, "f", "pairs").margin for m in (1, 0.5, "2", None)] == [1, 0.5, 2, None]
    assert read_record({**row, "margin": "x"}, "f", "verdicts").columns == {"margin": "x"}, "only pairs have one"
    for margin in ("x", math.nan, math.inf, True, [1]):
        with pytest.raises(DataError, match=r"f: margin is .*; a finite number"):
            read_record({**row, "margin": margin}, "f", "pairs")


def test_tokenised_rows():
    def learned(learn: str = "completion", **masks: Any) -> list[int]:
        record = read_record({"input_ids": [5, 6, 7], **masks}, "f", "texts", learn=learn)
        assert record.tokens and record.format == "tokenised"
        return [token for token, flag in zip(*record.tokens) if flag]

    assert learned() == [5, 6, 7]
    assert learned(labels=[-100, 6, -100], completion_mask=[0, 1, 1]) == [6]
    assert learned(completion_mask=[0, 1, 1], assistant_masks=[1, 1, 0]) == [6]
    assert learned("all", completion_mask=[0, 1, 1]) == [5, 6, 7]
    assert learned("assistant", assistant_masks=[1, 0, 1]) == [5, 7]
    assert learned(attention_mask=[1, 1, 0]) == [5, 6], "padding is left out"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"labels": [1, 6, 7]}, "labels holds other tokens than input_ids"),
        ({"labels": [5, 6]}, "labels has 2 values, input_ids has 3"),
        ({"completion_mask": [0, 2, 1]}, "completion_mask holds .*; only 0 and 1"),
        ({"input_ids": [1, "a", 2]}, "input_ids is .*; a list of integers"),
        ({"input_ids": [1, -1, 2]}, "input_ids holds -1"),
    ]
    for masks, message in wrong:
        with pytest.raises(DataError, match=rf"^f: {message}"):
            learned(**masks)
    with pytest.raises(DataError, match=r"data\.learn=assistant needs the column assistant_masks"):
        learned("assistant", completion_mask=[0, 1, 1])


WORDS = st.lists(st.sampled_from(["a", "bc", "bd", "12", "13", "é", "it's", "x."]), min_size=1, max_size=5)


@settings(deadline=None, max_examples=200)
@given(common=WORDS, chosen=WORDS, rejected=WORDS)
def test_implicit_prompts_of_words_as_trl_where_it_splits_no_word(common, chosen, rejected):
    assume(chosen[0][0] != rejected[0][0])
    sides: Any = {"chosen": " ".join(common + chosen), "rejected": " ".join(common + rejected)}
    theirs = extract_prompt(sides)
    count = shared_text(sides["chosen"], sides["rejected"])
    assert sides["chosen"][:count] == theirs["prompt"] == " ".join(common)


@settings(deadline=None, max_examples=200)
@given(chosen=WORDS.map(" ".join), rejected=WORDS.map(" ".join))
def test_an_implicit_prompt_begins_both_splits_no_word_and_leaves_something(chosen, rejected):
    count = shared_text(chosen, rejected)
    assert chosen[:count] == rejected[:count] and count == shared_text(rejected, chosen)
    if chosen != rejected:
        assert chosen[count:] and rejected[count:]
    for side in (chosen, rejected):
        inside = 0 < count < len(side) and side[count - 1].isalnum() and side[count].isalnum()
        assert not inside


@pytest.mark.parametrize(
    "chosen, rejected, prompt",
    [
        ("Q: 2+2? A: 12", "Q: 2+2? A: 13", "Q: 2+2? A:"),
        ("User: hi\n\nBot: yes", "User: hi\n\nBot: yes and no", "User: hi\n\nBot:"),
        ("User: hi\nYes", "User: hi\nNo", "User: hi\n"),
        ("A:yes", "A:no", "A:"),
        ("hello", "help", ""),
        ("the cafe\u0301", "the cafes", "the"),
        ("same", "same", ""),
        ("", "a", ""),
    ],
)
def test_implicit_prompts_of_strings(chosen, rejected, prompt):
    assert chosen[: shared_text(chosen, rejected)] == prompt


def test_implicit_prompts_of_messages():
    sides: Any = {"chosen": ASK + YES + [user("b")] + NO, "rejected": ASK + YES + [user("b")] + YES}
    count = shared_messages(sides["chosen"], sides["rejected"])
    assert sides["chosen"][:count] == extract_prompt(sides)["prompt"]
    longer = ASK + YES + [user("b")] + NO
    assert shared_messages(ASK + YES, longer) == 1, "the prompt ends before the assistant speaks"
    assert shared_messages(ASK + YES, [user("other"), *NO]) == 0
    system = [{"role": "system", "content": "s"}]
    assert shared_messages(system + ASK + YES, [*system, user("other"), *NO]) == 0
    assert shared_messages(ASK + YES, ASK + YES) == 1


def test_blank_texts():
    assert is_blank(" \n") and is_blank([]) and is_blank([assistant(" ")])
    assert is_blank([{"role": "system", "content": "s"}])
    assert not is_blank([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}])
    assert check_conversation([], "f") == [] and check_conversation("", "f", prompt=True) == ""


def test_the_reference_of_a_triple_is_one_of_its_completions():
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert read_record({**row, "reference": {"any": 1}}, "f", "pairs").columns == {"reference": {"any": 1}}
    with pytest.raises(DataError, match=r"f: columns found: .*triples needs the columns chosen, rejected, reference"):
        read_record({**row, "reference": None}, "f", "triples")
    with pytest.raises(DataError, match="chosen, rejected and reference are of two kinds"):
        read_record({"chosen": ASK + YES, "rejected": ASK + NO, "reference": "yes"}, "f", "triples")
    with pytest.raises(DataError, match="reference does not begin with the prompt that chosen and rejected have"):
        read_record({"chosen": "A: b", "rejected": "A: c", "reference": "d"}, "f", "triples")
