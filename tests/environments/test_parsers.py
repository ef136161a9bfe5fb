"""Parsers of calls: what real templates render is read back, and whatever a model writes is answered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_templates import tokenizer_of
from hypothesis import example, given
from hypothesis import strategies as st
from test_frames import TOOL

from lit_rl.core.errors import ConfigError
from lit_rl.environments.parser_base import BadCall, ParsedTurn, Parser
from lit_rl.environments.tool_parsers import HermesParser, Llama3Parser, MistralParser, RegexParser
from lit_rl.environments.tools import ToolCall

MUL = {
    "type": "function",
    "function": {"name": "mul", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
}
PARSERS: dict[str, Parser] = {
    "hermes": HermesParser(),
    "llama3": Llama3Parser(),
    "mistral": MistralParser(),
    "regex": RegexParser(r"(?P<name>\w+)\((?P<arguments>[^)]*)\)", [MUL]),
}
values = st.one_of(
    st.integers(-999, 999), st.booleans(), st.none(), st.text(max_size=8), st.lists(st.integers(), max_size=3)
)
arguments = st.dictionaries(st.sampled_from(["a", "b", "place", "ä"]), values, max_size=3)


def rendered(name: str, calls: list[dict[str, Any]], content: str = "") -> str:
    """The assistant's turn, as the family's own template writes it, without what ends it."""
    tokenizer, ends = tokenizer_of(name)
    asked = [{"role": "user", "content": "dummy"}]
    turn = {"role": "assistant", "content": content}
    turn["tool_calls"] = [{"type": "function", "function": call} for call in calls]  # type: ignore[assignment]
    settings = {"tokenize": False, "tools": [TOOL]}
    before = tokenizer.apply_chat_template(asked, add_generation_prompt=True, **settings)
    whole = tokenizer.apply_chat_template([*asked, turn], **settings)
    assert whole.startswith(before)
    first = min(whole.find(text, len(before)) % (1 << 40) for text in map(tokenizer.decode, ([end] for end in ends)))
    return whole[len(before) : first]


@given(called=st.lists(arguments, min_size=1, max_size=3))
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3_instruct_2507"])
def test_what_a_hermes_template_renders_is_read_back(template: str, called: list[dict[str, Any]]) -> None:
    calls = [{"name": f"tool{i}", "arguments": each} for i, each in enumerate(called)]
    turn = HermesParser().parse(rendered(template, calls, "I will look."))
    assert turn == ParsedTurn("I will look.", tuple(ToolCall(call["name"], call["arguments"]) for call in calls))


@given(called=st.lists(arguments, min_size=1, max_size=3))
def test_both_forms_of_mistral_are_read(called: list[dict[str, Any]]) -> None:
    calls = [{"name": f"tool{i}", "arguments": each, "id": f"call0000{i}"} for i, each in enumerate(called)]
    old = f"[TOOL_CALLS]{json.dumps(calls)}"
    new = "".join(f"[TOOL_CALLS]{call['name']}[ARGS]{json.dumps(call['arguments'])}" for call in calls)
    read = tuple(ToolCall(call["name"], call["arguments"], call["id"]) for call in calls)
    assert MistralParser().parse(old).calls == read
    assert MistralParser().parse(f"so {new}") == ParsedTurn("so", tuple(ToolCall(c.name, c.arguments) for c in read))


@given(a=st.integers(), b=st.integers())
def test_a_form_of_ones_own(a: int, b: int) -> None:
    assert PARSERS["regex"].parse(f"so mul({a},{b}) it is").calls == (ToolCall("mul", {"a": a, "b": b}),)


written = st.lists(
    st.sampled_from([*'<>/{}[]()",: abmul|n\\', "<tool_call>", "</tool_call>", "<think>", "[TOOL_CALLS]", "[ARGS]"]),
    max_size=30,
).map("".join)


def test_a_pattern_that_begins_at_the_beginning_finds_one_call() -> None:
    """`^` is where the response begins, or what is said behind its first thoughts."""
    parser = RegexParser(r"^(?P<name>\d)(?P<arguments>)", [])
    assert parser.parse("123").calls == (ToolCall("1", {}),)
    assert parser.parse("<think>9</think><think></think>4<think>5</think>6").calls == (ToolCall("4", {}),)
    assert parser.parse("so 7").calls == ()


@pytest.mark.parametrize("name", PARSERS)
@given(text=written)
@example(text="<tool_call>" + "[" * 100_000 + "</tool_call>")
@example(text='{"name": ' + "[" * 100_000)
@example(text="[TOOL_CALLS]" + "[" * 100_000)
@example(text="mul(" + "[" * 100_000 + ")")
def test_nothing_that_a_model_writes_raises(name: str, text: str) -> None:
    for call in PARSERS[name].parse(text).calls:
        assert isinstance(call, ToolCall | BadCall)


BAD = {
    "broken json": (
        "hermes",
        '<tool_call>\n{"name": "calc", "arguments": {"a": 3, "b": }}\n</tool_call>',
        "is no JSON",
    ),
    "no name": ("hermes", '<tool_call>{"arguments": {"a": 3}}</tool_call>', "has no name"),
    "unclosed": ("hermes", '<tool_call>\n{"name": "calc", "arguments": {"a": 3', "not closed by </tool_call>"),
    "a list": ("hermes", "<tool_call>[1,2]</tool_call>", "a call is an object with name and arguments, not [1, 2]"),
    "arguments are a list": ("hermes", '<tool_call>{"name": "x", "arguments": [1]}</tool_call>', "are no object: [1]"),
    "arguments are words": (
        "hermes",
        '<tool_call>{"name": "x", "arguments": "a=3"}</tool_call>',
        "arguments are no JSON",
    ),
    "cut": ("llama3", '{"name": "calc", "parameters": {"a": 3', "is no JSON"),
    "no list": ("mistral", '[TOOL_CALLS][{"name": "a"', "are no JSON list"),
    "cut arguments": ("mistral", '[TOOL_CALLS]calc[ARGS]{"a": ', "is no JSON"),
    "words": ("regex", "mul(one,2)", "no JSON values"),
    "too many": ("regex", "mul(1,2,3)", "mul takes 2 arguments, and 3 came"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_was_meant_as_a_call_is_told_from_text(name: str) -> None:
    parser, text, words = BAD[name]
    (call,) = PARSERS[parser].parse(text).calls
    assert isinstance(call, BadCall) and words in call.why


@pytest.mark.parametrize("name", PARSERS)
def test_text_is_no_call(name: str) -> None:
    for text in ("The answer is 42.", '{"answer": 42}', "[1, 2]", ""):
        assert PARSERS[name].parse(text) == ParsedTurn(text)


@pytest.mark.parametrize("none", ["null", '""', '"null"', "{}", '"{}"'])
@pytest.mark.parametrize(
    ("parser", "form"),
    [
        ("hermes", '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>'),
        ("hermes", '<tool_call>{{"name": "f", "parameters": {}}}</tool_call>'),
        ("llama3", '{{"name": "f", "parameters": {}}}'),
        ("mistral", '[TOOL_CALLS][{{"name": "f", "arguments": {}}}]'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}"),
    ],
)
def test_a_call_may_have_no_arguments(parser: str, form: str, none: str) -> None:
    assert PARSERS[parser].parse(form.format(none)).calls == (ToolCall("f", {}),)


def test_a_call_may_be_a_name_alone() -> None:
    assert HermesParser().parse('<tool_call>{"name": "f"}</tool_call>').calls == (ToolCall("f", {}),)


def test_arguments_by_another_name_are_not_dropped() -> None:
    (call,) = HermesParser().parse('<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>').calls
    assert isinstance(call, BadCall) and call.why == "the call has no arguments, and args beside its name"


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ('{"name": "Bob", "age": 3}', []),
        ('{"name": "Bob", "age": ', []),
        ('{"type": "dog"}', []),
        ('{"parameters": 7}', []),
        ('{"answer": {"name": "mul", "parameters": {"a": 1}}}', []),
        ('He said {"name": "Bob", "parameters": {"a": 1}}.', []),
        ('{"name": "div", "parameters": {"a": 1}}', [ToolCall("div", {"a": 1})]),
        ('{"name": "mul"}', [ToolCall("mul", {})]),
        ('{"name": "mul", "age": 3}', ["age beside its name"]),
        ('{"name": "mul", "para', ["is no JSON"]),
        ('{"name": "mul", "parameters": {"a": 1}}; {"name": "Bob"}', [ToolCall("mul", {"a": 1}), ToolCall("Bob", {})]),
        ('Sure: {"name": "mul", "parameters": {"a": 1}}.', [ToolCall("mul", {"a": 1})]),
    ],
)
def test_llama_tells_a_call_from_an_answer_that_is_json(said: str, calls: list[ToolCall | str]) -> None:
    read = Llama3Parser([MUL]).parse(said).calls
    assert len(read) == len(calls)
    for call, meant in zip(read, calls):
        assert call == meant if isinstance(meant, ToolCall) else isinstance(call, BadCall) and meant in call.why


@pytest.mark.parametrize("written", ["[CALL_ID]x[ARGS]", "[ARGS]", "", " [CALL_ID]abcDEF123[ARGS] "])
def test_a_name_of_mistral_ends_where_its_id_or_its_arguments_begin(written: str) -> None:
    (call,) = MistralParser().parse(f'[TOOL_CALLS]mul{written}{{"a": "[TOOL_CALLS]"}} so').calls
    id_ = written.partition("[CALL_ID]")[2].partition("[ARGS]")[0] or None
    assert call == ToolCall("mul", {"a": "[TOOL_CALLS]"}, id_)


def test_arguments_that_are_json_text_are_read() -> None:
    text = '<tool_call>{"name": "calc", "arguments": "{\\"a\\": 3}"}</tool_call>'
    assert HermesParser().parse(text).calls == (ToolCall("calc", {"a": 3}),)


@pytest.mark.parametrize(
    ("pattern", "words"), [("(", "no regular expression"), (r"(?P<name>\w+)", "no group arguments")]
)
def test_a_pattern_that_reads_nothing_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.call_pattern.*{words}"):
        RegexParser(pattern, [MUL])
