"""Calls that the chat templates of the families render are read back, by a parser that is found from the template."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from chat_templates import names, tokenizer_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_frames import frames_of
from trl.chat_template_utils import supports_tool_calling

from lit_rl.core.errors import ConfigError
from lit_rl.environments.parser_base import BadCall, ParsedTurn, Parser
from lit_rl.environments.tool_parsers import (
    PARSERS,
    DeepSeekV3Parser,
    Gemma4Parser,
    Glm4Parser,
    GptOssParser,
    HermesParser,
    Lfm2Parser,
    Llama3Parser,
    MuseGlimmerParser,
    Qwen35Parser,
    TemplateParser,
    parse_typed,
    parser_for,
    rendered_call,
)
from lit_rl.environments.tools import ToolCall


def parameter(type_: str, **more: Any) -> dict[str, Any]:
    return {"type": type_, "description": "An argument.", **more}


SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": parameter("string"),
                "whole": parameter("integer"),
                "broken": parameter("number"),
                "flag": parameter("boolean"),
                "listed": parameter("array", items={"type": "string"}),
                "nested": parameter("object"),
                "maybe": parameter("string", nullable=True),
            },
        },
    },
}

FAMILIES: dict[type[Parser], list[str]] = {
    HermesParser: ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"],
    Llama3Parser: ["llama3_1", "llama3_2"],
    Qwen35Parser: [
        "nemotron_3_5_lightning",
        "nemotron_3_nano",
        "nemotron_3_super",
        "nemotron_3_ultra",
        "qwen3_5_nothink",
        "qwen3_5_think",
        "qwen3_6",
        "qwen3_8",
    ],
    Glm4Parser: ["glm4moe"],
    GptOssParser: ["gptoss"],
    DeepSeekV3Parser: ["deepseekv3"],
    Gemma4Parser: ["diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"],
    Lfm2Parser: ["lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2"],
    MuseGlimmerParser: ["muse_glimmer"],
}
FAMILY = {name: family for family, members in FAMILIES.items() for name in members}
RENDER_NO_CALLS = {
    **dict.fromkeys(["cohere", "gemma", "gemma3"], "refuses them: Conversation roles must alternate"),
    "llava_next": "refuses them: Only user and assistant roles are supported",
    **dict.fromkeys(["idefics3", "smolvlm"], "drops the calls of tools"),
    **dict.fromkeys(["cohere2", "deepseek_r1_distill", "lfm2", "llama3"], "drops the calls of tools"),
    **dict.fromkeys(["phi3", "phi3_5", "qwen2_5_vl"], "drops the calls of tools"),
}
"""And why. `ChatFrames` refuses them with these words; TRL's `supports_tool_calling` says so too."""

UNESCAPED = {"lfm2_2_5", "lfm2_2_5_v2"}
"""They write a text between single quotes as it stands: one with a quote or a backslash cannot be read by anybody."""


@pytest.mark.parametrize("name", names())
def test_every_template_that_renders_tools_is_read_or_refused_by_name(name: str) -> None:
    tokenizer, _ = tokenizer_of(name)
    assert supports_tool_calling(tokenizer) == (name in FAMILY) == (name not in RENDER_NO_CALLS)
    if name in FAMILY:
        assert type(parser_for("auto", tokenizer, [SCHEMA], None)) is FAMILY[name]
        return
    with pytest.raises(ConfigError, match=r"env\.parser=auto: .*qwen3_5.* or to regex"):
        parser_for("auto", tokenizer, [SCHEMA], None)
    with pytest.raises(ConfigError, match=f"it {RENDER_NO_CALLS[name]}"):
        frames_of(name, "tool")


# ---------------------------------------------------------------------------------------------------- round trip

text = st.text(st.sampled_from([*"aZ9 \n\t'\"\\{}[]():=,;<>&/%é漢😀"]), max_size=12)
text = text | st.sampled_from(["null", "17", "True", "[1]"])
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.floats(-1e9, 1e9, width=32), text),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "long_key"]), inner),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": text,
        "whole": st.integers(),
        "broken": st.floats(-1e9, 1e9),
        "flag": st.booleans(),
        "listed": st.lists(json_values, max_size=3),
        "nested": st.dictionaries(st.sampled_from(["a", "b", "long_key"]), json_values, max_size=3),
        "maybe": st.none() | st.sampled_from(["some", "it's one\nof two"]),
    },
)
EVERYTHING = {
    "text": 'He said "it\'s 3 \\ 4"\nthen {left} [é漢😀] <b>, a=1: 17',
    "whole": -17,
    "broken": 1e-07,
    "flag": False,
    "listed": ["a, b", "]", "", {"a": None, "b": [True, 2, 0.5]}],
    "nested": {"a": {"b": {"long_key": 'x"y'}}, "b": []},
    "maybe": None,
}


def escaped_away(value: Any) -> Any:
    """Without what `UNESCAPED` cannot tell from the end of a text."""
    if isinstance(value, str):
        return value.replace("'", "").replace("\\", "")
    if isinstance(value, list):
        return [escaped_away(each) for each in value]
    return {k: escaped_away(v) for k, v in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("name", sorted(FAMILY))
@given(called=arguments)
@example(called=EVERYTHING)
@settings(max_examples=12)
def test_what_a_template_renders_is_read_back(name: str, called: dict[str, Any]) -> None:
    tokenizer, _ = tokenizer_of(name)
    call = ToolCall("look_up", escaped_away(called) if name in UNESCAPED else called)
    parser = parser_for("auto", tokenizer, [SCHEMA], None)
    reads = [written(parser.parse(turn)) for turn in rendered_call(tokenizer, call, [SCHEMA])]
    assert [json.dumps([call.name, call.arguments], sort_keys=True)] in reads, reads[:1]


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_names_of_tools_and_arguments_are_those_that_servers_have(name: str) -> None:
    """And texts of arguments may spell the marks of a thought and of a call."""
    tokenizer, _ = tokenizer_of(name)
    for tool, key in (("get-weather", "k-1"), ("files.read", "the key"), ("srv__tool/v2", "text")):
        schema = {"name": tool, "description": "", "parameters": {"properties": {key: parameter("string")}}}
        tools = [{"type": "function", "function": schema}]
        call = ToolCall(tool, {key: "<tool_call>{</think> a"})
        parser = parser_for("auto", tokenizer, tools, None)
        reads = [written(parser.parse(turn)) for turn in rendered_call(tokenizer, call, tools)]
        assert [json.dumps([call.name, call.arguments])] in reads


def written(turn: ParsedTurn) -> list[str]:
    """The calls as text, in which 1, 1.0 and True are not the same."""
    return [
        call.why if isinstance(call, BadCall) else json.dumps([call.name, call.arguments], sort_keys=True)
        for call in turn.calls
    ]


@pytest.mark.parametrize(
    "name", ["qwen3_5_think", "nemotron_3_nano", "glm4moe", "gemma4_v5", "lfm2_v2", "muse_glimmer"]
)
def test_several_calls_of_a_turn_are_read_in_their_order(name: str) -> None:
    tokenizer, _ = tokenizer_of(name)
    functions = [{"name": each, "arguments": {"text": f"the {each} text"}} for each in ("first", "second", "third")]
    said = {
        "role": "assistant",
        "content": "So.",
        "tool_calls": [{"type": "function", "function": f} for f in functions],
    }
    asked = [{"role": "user", "content": "a"}]
    before, whole = (
        tokenizer.apply_chat_template(messages, tools=[SCHEMA], tokenize=False) for messages in (asked, [*asked, said])
    )
    turn = BY_NAME[FAMILY_NAMES[FAMILY[name]]].parse(whole.removeprefix(before))
    assert turn.calls == tuple(ToolCall(f["name"], f["arguments"]) for f in functions)
    assert "text" not in turn.content


# ---------------------------------------------------------------------------------------------------- what models write

FAMILY_NAMES: dict[type[Parser], str] = {
    Qwen35Parser: "qwen3_5",
    Glm4Parser: "glm4",
    GptOssParser: "gptoss",
    DeepSeekV3Parser: "deepseek_v3",
    Gemma4Parser: "gemma4",
    Lfm2Parser: "lfm2",
    MuseGlimmerParser: "muse_glimmer",
}
BY_NAME = {name: parser_for(name, None, [SCHEMA], None) for name in FAMILY_NAMES.values()}
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"

BAD = {
    "qwen3_5 unclosed": ("qwen3_5", "<tool_call>\n<function=a>\n<parameter=x>\n1", "not closed by </tool_call>"),
    "qwen3_5 json": ("qwen3_5", '<tool_call>{"name": "a"}</function></tool_call>', "a call is <function=NAME>"),
    "qwen3_5 argument": (
        "qwen3_5",
        "<tool_call>\n<function=a>\n<parameter=x>\n1\n</function>\n</tool_call>",
        "an argument cannot be read: <parameter=x>",
    ),
    "glm4 unclosed": ("glm4", "<tool_call>a\n<arg_key>x</arg_key>", "not closed by </tool_call>"),
    "glm4 no value": ("glm4", "<tool_call>a\n<arg_key>x</arg_key>\n</tool_call>", "cannot be read: <arg_key>x"),
    "glm4 json": ("glm4", '<tool_call>{"name": "a"}</tool_call>', "a call is NAME, and <arg_key>"),
    "gptoss cut": ("gptoss", "<|channel|>commentary to=functions.a <|constrain|>json<|message|>{", "no JSON"),
    "gptoss no message": ("gptoss", "<|channel|>commentary to=functions.a {}", "no <|message|> stands behind"),
    "gptoss list": ("gptoss", " to=functions.a<|channel|>commentary json<|message|>[1]", "are no object: [1]"),
    "deepseek unclosed": ("deepseek_v3", f"{DEEPSEEK}a\n```json\n{{}}\n```", "not closed by <｜tool▁call▁end｜>"),
    "deepseek no block": ("deepseek_v3", f"{DEEPSEEK}a {{}}<｜tool▁call▁end｜>", "a block of ```json"),
    "deepseek nothing": ("deepseek_v3", "<｜tool▁calls▁begin｜>", "no call stands behind"),
    "gemma4 unclosed": ("gemma4", "<|tool_call>call:a{x:1", "not closed by <tool_call|>"),
    "gemma4 word": ("gemma4", "<|tool_call>call:a{x:one}<tool_call|>", "no value at 'one}'"),
    "gemma4 more": ("gemma4", "<|tool_call>call:a{x:1}}<tool_call|>", "the call ends before '}'"),
    "lfm2 unclosed": ("lfm2", "<|tool_call_start|>[a(x=1)]", "not closed by <|tool_call_end|>"),
    "lfm2 position": ("lfm2", "<|tool_call_start|>[a(1)]<|tool_call_end|>", "something else stands at ')]'"),
    "lfm2 no list": ("lfm2", "<|tool_call_start|>a(x=1)<|tool_call_end|>", "something else stands at 'a(x=1)'"),
    "muse unclosed": ("muse_glimmer", '<atem:function_calls>\n<atem:invoke name="a">', "not closed by </atem:"),
    "muse form": ("muse_glimmer", "<atem:function_calls>a</atem:function_calls>", "a call is <atem:invoke"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_was_meant_as_a_call_is_told_from_text(name: str) -> None:
    parser, said, words = BAD[name]
    (call,) = BY_NAME[parser].parse(said).calls
    assert isinstance(call, BadCall) and words in call.why


PIECES = [
    *"<>/{}[]()\"',:= a1\\\n",
    *("<tool_call>", "</tool_call>", "<function=look_up>", "</function>", "<parameter=text>", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|start|>", "<|message|>", " to=functions.a"),
    *(
        DEEPSEEK,
        "\n```json\n",
        "<｜tool▁call▁end｜>",
        "<|tool_call>call:a{",
        "<tool_call|>",
        '<|"|>',
        "<|channel>thought",
    ),
    *("<|tool_call_start|>[", "<|tool_call_end|>", "<atem:function_calls>", "</atem:function_calls>", "</atem:invoke>"),
]


@pytest.mark.parametrize("name", BY_NAME)
@given(said=st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
@example(said="<|tool_call>call:a{x:" + "[" * 100_000 + "<tool_call|>")
@example(said="<|tool_call_start|>[a(x=" + "[" * 100_000 + "<|tool_call_end|>")
@example(said="<|tool_call>call:a{x:" + "1" * 5_000 + "}<tool_call|>")
@example(said="<tool_call>look_up<arg_key>nested</arg_key><arg_value>" + "[" * 100_000 + "</arg_value></tool_call>")
@example(said=r"<|tool_call_start|>[a(x='\ud800 \U00110000')]<|tool_call_end|>")
def test_nothing_that_a_model_writes_raises(name: str, said: str) -> None:
    for call in BY_NAME[name].parse(said).calls:
        json.dumps(call.why if isinstance(call, BadCall) else call.arguments, ensure_ascii=False).encode()


@pytest.mark.parametrize("name", BY_NAME)
def test_text_is_no_call(name: str) -> None:
    for said in ("The answer is 42.", '{"answer": 42}', "[f(a=1)]", "I write to=functions.calc", ""):
        assert BY_NAME[name].parse(said) == ParsedTurn(said)


def test_gpt_oss_thinks_and_then_calls() -> None:
    call = '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"whole": 3}<|call|>'
    thought = "<|channel|>analysis<|message|>I call to=functions.look_up now.<|end|>"
    turn = BY_NAME["gptoss"].parse(f"{thought}<|start|>assistant{call}")
    assert turn == ParsedTurn("", (ToolCall("look_up", {"whole": 3}),)), "what is thought is no content"
    assert BY_NAME["gptoss"].parse("<|channel|>final<|message|>3").calls == ()


def test_gemma_calls_nothing_in_its_thoughts() -> None:
    call = "<|tool_call>call:look_up{whole:3}<tool_call|>"
    assert BY_NAME["gemma4"].parse(f"<|channel>thought\n{call}").calls == ()
    assert BY_NAME["gemma4"].parse(f"<|channel>thought\n{call}<channel|>{call}").calls == (
        ToolCall("look_up", {"whole": 3}),
    )


@pytest.mark.parametrize(
    ("said", "schema", "value"),
    [
        ("17", {"type": "string"}, "17"),
        ("17", {"type": "integer"}, 17),
        ("three", {"type": "integer"}, "three"),
        ("17", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 17),
        ("1.5", {"type": ["string", "integer"]}, "1.5"),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "string", "nullable": True}, "true"),
        ("None", {"type": "string", "nullable": True}, None),
        ("1", {"enum": ["1", "2"]}, "1"),
        ('"a"', {}, '"a"'),
        ("[1]", None, [1]),
        ("[1]", {"anyOf": [{"type": "string"}, {"$ref": "#/x"}]}, [1]),
    ],
)
def test_the_schema_says_what_a_text_is(said: str, schema: Any, value: Any) -> None:
    assert (type(parse_typed(said, schema)), parse_typed(said, schema)) == (type(value), value)


# ---------------------------------------------------------------------------------------------------- who says it


def test_a_template_of_the_tokenizer_gets_the_types_from_the_schema() -> None:
    from trl.chat_template_utils import add_response_schema

    tokenizer = copy.deepcopy(tokenizer_of("qwen3_5_think")[0])
    parser = parser_for("auto", add_response_schema(tokenizer), [SCHEMA], None)
    assert type(parser) is TemplateParser
    call = ToolCall("look_up", {"text": "17", "whole": 17})
    (read,) = parser.parse(next(iter(rendered_call(tokenizer, call, [SCHEMA])))).calls
    assert isinstance(read, ToolCall) and read.arguments == call.arguments


def test_a_response_schema_is_read_by_nothing_and_so_the_chat_template_decides() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("glm4moe")[0])
    tokenizer.response_schema = {"type": "object"}
    assert type(parser_for("auto", tokenizer, [SCHEMA], None)) is Glm4Parser


def test_every_name_has_its_parser() -> None:
    assert {*FAMILY_NAMES.values(), "hermes", "llama3", "mistral", "regex"} == set(PARSERS)
    for family, name in FAMILY_NAMES.items():
        assert type(BY_NAME[name]) is family
