"""Messages and tools as other programs write them become the same rows as our own form."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from datasets import Dataset as Table
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.core.errors import DataError
from lit_rl.data.example_formats import check_conversation
from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.data.kinds import kind_of
from lit_rl.data.message_forms import MESSAGES, normalize_messages, read_tools
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.readers import row_of_table
from lit_rl.models import LanguageModel

ASK, REPLY, OTHER = (
    [{"role": "user", "content": "What is 'a\"b'\n+1?"}],
    [{"role": "assistant", "content": "2"}],
    [{"role": "assistant", "content": "3"}],
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
TALK = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text()}),
    min_size=1,
    max_size=4,
)
SHAREGPT = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}


def sharegpt(messages):
    return [{"from": SHAREGPT[m["role"]], "value": m["content"]} for m in messages]


FORMS = {
    "json": json.dumps,
    "python": repr,
    "text of each": lambda messages: [json.dumps(message) for message in messages],
    "encoded twice": lambda messages: json.dumps(json.dumps(messages)),
    "sharegpt": sharegpt,
    "json of sharegpt": lambda messages: json.dumps(sharegpt(messages)),
}


@settings(max_examples=200)
@given(form=st.sampled_from([*FORMS]), name=st.sampled_from([*MESSAGES, "question"]), messages=TALK)
def test_every_form_of_messages_in_every_column_is_the_same_list(form, name, messages):
    row, notes = normalize_messages({name: FORMS[form](messages), "answer": "[{'role': 1}]"}, "f:1", "question")
    assert row == {name: messages, "answer": "[{'role': 1}]"} and len(notes) == 1


@given(messages=TALK)
def test_messages_in_our_form_are_the_very_same_and_nothing_is_said(messages):
    row, notes = normalize_messages({"messages": messages, "text": "a"}, "f:1")
    assert row["messages"] is messages and notes == []


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        '[{"a": 1}]',
        '{"a": 1}',
        "[",
        "[{",
        "",
        '["role"]',
        "{'a': 1, 'b'}",
        '[{"from": "here", "to": 1}]',
        '{"from": "0x1f", "value": 3, "to": "0x2a"}',
        '[{"role": "engineer", "content": "steel"}]',
        '{"role": ["engineer"], "content": "steel"}',
        '{"role": "admin", "name": "Bo", // a comment',
        "{'role': 'x'} is no JSON because",
        "nan",
    ],
)
def test_any_other_text_stays_a_text(text):
    assert normalize_messages({"prompt": text}, "f:1") == ({"prompt": text}, [])


@pytest.mark.parametrize(
    "text",
    [
        "[{'role': 'user', 'content': 'a'} {'role': 'user', 'content': 'b'}]",
        '[{"role": "user", "content": "cut of',
        "[{'role': 'user', 'content': array(['a'])}]",
    ],
)
def test_a_text_that_names_roles_and_cannot_be_read_is_refused(text):
    with pytest.raises(DataError, match=r"^f:1: prompt is a text .* json.dumps"):
        normalize_messages({"prompt": text}, "f:1")


def test_numpy_writes_lists_of_messages_without_commas():
    messages = [{"role": "user", "content": "a long enough one: } {"}, *REPLY]
    text = str(np.array(messages)).replace("} {'role'", "}\n {'role'")
    assert normalize_messages({"messages": text}, "f:1")[0] == {"messages": messages}


def test_conversations_are_messages_or_the_prompt_of_a_pair():
    row, notes = normalize_messages({"conversations": sharegpt(ASK + REPLY), "system": "Be brief."}, "f:1")
    assert row == {"messages": [{"role": "system", "content": "Be brief."}, *ASK, *REPLY]}
    assert notes == [
        "conversations is read as a list of messages: it came as messages of other keys",
        "the column conversations is read as messages",
    ]
    pair = {"conversations": sharegpt(ASK), "chosen": sharegpt(REPLY)[0], "rejected": sharegpt(OTHER)[0]}
    assert normalize_messages(pair, "f:1")[0] == {"prompt": ASK, "chosen": REPLY, "rejected": OTHER}
    assert normalize_messages({"conversations": sharegpt(ASK)}, "f:1", "conversations")[0] == {"conversations": ASK}
    assert normalize_messages({"conversations": ASK + REPLY}, "f:1")[0] == {"messages": ASK + REPLY}
    assert normalize_messages({"conversations": 3, "prompt": "a"}, "f:1")[0] == {"conversations": 3, "prompt": "a"}


@pytest.mark.parametrize("form", [json.dumps, repr, lambda tools: [json.dumps(tool) for tool in tools], list])
def test_tools_are_read_from_every_form(form):
    assert read_tools(form(TOOLS), "f:1") == TOOLS


CELLS = {
    "prompts": ({"prompt": ASK, "answer": "2"}, RolloutDataModule),
    "completions": ({"prompt": ASK, "completion": REPLY}, SupervisedDataModule),
    "messages": ({"messages": ASK + REPLY, "tools": TOOLS}, SupervisedDataModule),
    "pairs": ({"prompt": ASK, "chosen": REPLY, "rejected": OTHER}, PreferenceDataModule),
}


@pytest.mark.parametrize("write", [json.dumps, repr], ids=["json", "python"])
@pytest.mark.parametrize("kind", CELLS)
def test_a_table_of_cells_gives_the_tokens_of_the_rows_themselves(tmp_path, kind, write):
    row, module = CELLS[kind]
    with open(tmp_path / "t.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow({name: value if isinstance(value, str) else write(value) for name, value in row.items()})
    tokenizer = LanguageModel("tiny").tokenizer
    ours, theirs = module(rows=[row], val_fraction=0), module(path=str(tmp_path / "t.csv"), val_fraction=0)
    for data in (ours, theirs):
        data.prepare(tokenizer)
    if module is RolloutDataModule:
        assert theirs.peek(1).prompt_ids == ours.peek(1).prompt_ids and theirs.fingerprint == ours.fingerprint
    else:
        assert [e.texts for e in theirs.corpus.train.examples] == [e.texts for e in ours.corpus.train.examples]


def test_lists_of_labelled_steps_are_read_from_cells(tmp_path):
    from lit_rl.data.example_module import StepwiseDataModule

    row = {"prompt": "1+1=", "completions": ["a", "b"], "labels": [True, False]}
    ours = StepwiseDataModule(rows=[row], val_fraction=0)
    texts = {"prompt": "1+1=", "completions": repr(["a", "b"]), "labels": "[true, false]"}
    theirs = StepwiseDataModule(rows=[texts], val_fraction=0)
    assert kind_of(texts) == "stepwise"
    for data in (ours, theirs):
        data.prepare(LanguageModel("tiny").tokenizer)
    (one,), (other,) = ours.corpus.train.examples, theirs.corpus.train.examples
    assert (one.texts, one.labels) == (other.texts, other.labels)


def test_rows_of_numpy_and_pandas_are_plain_ones():
    pd = pytest.importorskip("pandas")
    plain = [{"prompt": ASK, "answer": 2, "tags": ["a"]}, {"prompt": ASK, "answer": 3, "tags": []}]
    rows = [
        {
            "prompt": np.array(row["prompt"]),
            "answer": np.int64(row["answer"]),
            "tags": np.array(row["tags"], dtype=object),
        }
        for row in plain
    ]
    for given_rows in (rows, pd.DataFrame(rows).to_dict("records")):
        data = RolloutDataModule(rows=given_rows, val_fraction=0)
        data.prepare(LanguageModel("tiny").tokenizer)
        batch = data.peek(2)
        assert batch.prompts == [ASK, ASK] and batch.columns == {"answer": [2, 3], "tags": [["a"], []]}
        assert [type(value) for value in batch.columns["answer"]] == [int, int]


def test_a_missing_cell_of_pandas_is_none_and_not_the_text_nan():
    data = RolloutDataModule(rows=[{"prompt": "a", "answer": float("nan")}, {"prompt": "b", "answer": "4"}])
    data.val_fraction = 0
    data.prepare(LanguageModel("tiny").tokenizer)
    assert data.peek(2).columns["answer"] == [None, "4"]


# ---------------------------------------------------------------------------------- calls, answers and thoughts


ARGUMENTS = {"city": "Zürich", "trip": {"days": 2, "from": None}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
OF_OURS = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
NAMED = {**CALL, "id": "c1"}


def _calling(calls, **keys):
    return {"role": "assistant", "content": "I look.", "tool_calls": calls, **keys}


CALLS = {
    "text": _calling(json.dumps([CALL])),
    "text of Python": _calling(repr([CALL])),
    "text of each": _calling([json.dumps(CALL)]),
    "text of the function": _calling([{"type": "function", "function": json.dumps(CALL["function"])}]),
    "one": _calling(CALL),
    "name at the top": _calling([{"name": "weather", "arguments": ARGUMENTS}]),
    "name at the top, as text": _calling(json.dumps([{"name": "weather", "arguments": ARGUMENTS}])),
    "of LangChain": _calling([{"name": "weather", "args": ARGUMENTS, "id": None, "type": "tool_call"}]),
    "of Llama": _calling([{"name": "weather", "parameters": ARGUMENTS}]),
    "parameters in the function": _calling([{"type": "function", "function": {"name": "weather", "args": ARGUMENTS}}]),
    "function is a name": _calling([{"function": "weather", "arguments": ARGUMENTS}]),
    "older API": {"role": "assistant", "content": "I look.", "tool_calls": None, "function_call": CALL["function"]},
    "role of Gemini": _calling([CALL]) | {"role": "model"},
    "capital": _calling([CALL]) | {"role": "Assistant"},
}  # fmt: skip


@pytest.mark.parametrize("message", CALLS.values(), ids=[*CALLS])
def test_every_form_of_a_call_is_ours(message):
    before = json.dumps(message)
    row, notes = normalize_messages({"messages": [*ASK, message]}, "f:1")
    assert row["messages"][1] == OF_OURS and row["messages"][0] is ASK[0] and len(notes) == 1
    assert json.dumps(message) == before, "the row keeps its own"
    assert normalize_messages({"messages": [*ASK, OF_OURS]}, "f:1")[0]["messages"][1] is OF_OURS


ANTHROPIC = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "They ask for weather.", "signature": "EqQB"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": ARGUMENTS},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Rain."}]},
            {"type": "text", "text": "And?"},
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "Take a coat."}]},
]
OPENAI = [
    ANTHROPIC[0],
    {"role": "assistant", "reasoning_content": "They ask for weather.", "content": "I look.", "tool_calls": [NAMED]},
    {"role": "tool", "content": "Rain.", "tool_call_id": "c1", "name": "weather"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Take a coat."},
]


def in_parts(message):
    return (
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
    )


@pytest.mark.parametrize("form", ["list", "text", "table"])
def test_a_talk_of_anthropics_api_is_that_of_openais(form):
    """Also as a column of a table, which fills the keys that a part or a call does not have with None."""
    given = json.dumps(ANTHROPIC) if form == "text" else ANTHROPIC
    ours = json.loads(json.dumps(OPENAI))
    if form == "table":
        given = row_of_table(Table.from_list([{"messages": [*map(in_parts, ANTHROPIC)]}])[0])["messages"]
        del ours[1]["tool_calls"][0]["function"]["arguments"]["trip"]["from"]  # its null is one of the table's
    assert check_conversation(normalize_messages({"messages": given}, "f:1")[0]["messages"], "f:1") == ours


def test_the_older_api_and_llama_factory_answer_a_call_with_a_message_of_the_tool():
    function = json.dumps({"name": "weather", "arguments": ARGUMENTS})
    talk = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": function},
        {"from": "observation", "value": "Rain."},
    ]
    older = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "function_call": json.loads(function)},
        {"role": "function", "content": "Rain."},
    ]
    calling, answer = {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "Rain."}
    for column, form in (("conversations", talk), ("messages", older)):
        found = normalize_messages({column: form}, "f:1")[0]["messages"]
        assert check_conversation(found, "f:1") == [ANTHROPIC[0], calling, answer]


OTHER_CALL = {"type": "function", "function": {"name": "time", "arguments": {}}}
TEXT_OF_IT = {"type": "function", "function": {**CALL["function"], "arguments": json.dumps(ARGUMENTS)}}
SAME = {
    "older and newer API": (_calling([CALL], function_call=TEXT_OF_IT["function"]), OF_OURS),
    "content and key": ({**ANTHROPIC[1], "tool_calls": [NAMED]}, OPENAI[1]),
    "blanks before a thought": (
        {**ANTHROPIC[1], "content": [{"type": "text", "text": "\n\n"}, *ANTHROPIC[1]["content"]]},
        OPENAI[1],
    ),
    "null as text": (
        {"role": "assistant", "content": "a", "tool_calls": "null"},
        {"role": "assistant", "content": "a"},
    ),
    "None as text": (
        {"role": "assistant", "content": "a", "tool_calls": "None"},
        {"role": "assistant", "content": "a"},
    ),
    "a struct of a table": (
        {"role": "assistant", "content": "a", "function_call": {"name": None, "arguments": None}},
        {"role": "assistant", "content": "a"},
    ),
    "a part of the system": (
        {"role": "system", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "system", "content": "a"},
    ),
}


@pytest.mark.parametrize("message, ours", SAME.values(), ids=[*SAME])
def test_what_is_written_twice_or_says_nothing_is_read_once(message, ours):
    assert check_conversation(normalize_messages({"messages": [*ASK, message]}, "f:1")[0]["messages"], "f:1") == [
        *ASK,
        ours,
    ]


def test_in_a_call_of_our_form_its_arguments_count_and_an_answer_without_id_has_no_name():
    call = {"function": {"name": "f", "arguments": {}, "parameters": {"x": 1}}}
    answer = {"role": "user", "content": [{"type": "tool_result", "content": "1"}]}
    given = [*ASK, _calling([call]), answer]
    found = normalize_messages({"messages": given}, "f:1")[0]["messages"]
    assert found == [*given[:-1], {"role": "tool", "content": "1"}] and found[1] is given[1]


UNCLEAR = {
    "two names": (_calling([{"name": "f", "arguments": {}, "parameters": {"a": 1}}]), "arguments and parameters: keep"),
    "two keys": (_calling([OTHER_CALL], function_call=CALL["function"]), "function_call and others in tool_calls"),
    "two ids": (_calling([NAMED], function_call={**NAMED, "id": "c2"}), "function_call and others in tool_calls"),
    "text": (_calling("f(1)"), "calls of tools that are no JSON"),
    "words behind a call": (
        {"role": "assistant", "content": [*ANTHROPIC[1]["content"], {"type": "text", "text": "Wait."}]},
        "says something behind a call",
    ),
    "thoughts behind words": (
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}]},
        "thinks behind what it says",
    ),
    "encrypted": ({"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, "encrypted"),
    "two thoughts": ({**ANTHROPIC[1], "reasoning": "hm"}, "thoughts in its content and in a key of its own"),
    "two places": ({**ANTHROPIC[1], "tool_calls": [OTHER_CALL]}, "calls in its content and others in tool_calls"),
    "no text": ({"role": "assistant", "content": [{"type": "thinking", "thinking": 3}]}, "a thought without text"),
}


def test_what_was_said_in_an_order_that_no_template_writes_is_refused():
    for message, words in UNCLEAR.values():
        with pytest.raises(DataError, match=f"^f:1: messages: message 1 .*{words}"):
            normalize_messages({"messages": [*ASK, message]}, "f:1")
