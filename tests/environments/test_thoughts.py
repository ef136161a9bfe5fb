"""Thoughts and calls are told apart from left to right, by every parser and as the chat template marks them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from chat_templates import tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from talks import Talk, asked
from trl.chat_template_utils import add_response_schema

from lit_rl.environments.interaction import Interaction
from lit_rl.environments.parser_base import BadCall, Parser
from lit_rl.environments.thoughts import BRACKETS, CHANNEL, THINK, Thoughts
from lit_rl.environments.tool_parsers import PARSERS, parser_for
from lit_rl.environments.tools import ToolCall
from lit_rl.environments.user_environments import FunctionTools

FUNCTION = {
    "name": "say",
    "description": "Says.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "What."}}},
}
SAY = {"type": "function", "function": FUNCTION}


def deepseek(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


FORMS: dict[str, tuple[str, str]] = {
    "hermes": ('<tool_call>{"name": "say", "arguments": {"text": "%s"}}</tool_call>', "<tool_call>{</tool_call>"),
    "llama3": ('<|python_tag|>{"name": "say", "parameters": {"text": "%s"}}', ""),
    "mistral": ('[TOOL_CALLS]say[ARGS]{"text": "%s"}', "[TOOL_CALLS]say[ARGS]{"),
    "qwen3_5": (
        "<tool_call>\n<function=say>\n<parameter=text>\n%s\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=say></tool_call>",
    ),
    "glm4": (
        "<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
        "<tool_call>say<arg_key></tool_call>",
    ),
    "gptoss": (
        '<|start|>assistant<|channel|>commentary to=functions.say json<|message|>{"text": "%s"}<|call|>',
        "<|start|>assistant<|channel|>commentary to=functions.say json<|message|>{<|call|>",
    ),
    "deepseek_v3": (deepseek("say", '{"text": "%s"}'), deepseek("say", "{")),
    "gemma4": ('<|tool_call>call:say{text:<|"|>%s<|"|>}<tool_call|>', "<|tool_call>say{<tool_call|>"),
    "lfm2": ("<|tool_call_start|>[say(text='%s')]<|tool_call_end|>", "<|tool_call_start|>[<|tool_call_end|>"),
    "muse_glimmer": (
        '<atem:function_calls>\n<atem:invoke name="say">\n<atem:parameter name="text">%s</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>",
        "<atem:function_calls>say</atem:function_calls>",
    ),
    "regex": ('say("%s")', "say(that)"),
}
"""A call by each parser, of a text that stands in the place of %s; and one that cannot be read. Llama's has no end."""

THOUGHT = {name: ("<think>", "</think>") for name in FORMS} | {
    "gptoss": ("<|start|>assistant<|channel|>analysis<|message|>", "<|end|>"),
    "gemma4": CHANNEL,
}
SAID = {name: "Fine. " for name in FORMS} | {"gptoss": "<|start|>assistant<|channel|>final<|message|>Fine.<|end|>"}
TEXTS = ["a", "<think> b", "b </think>", "<tool_call>", "</tool_call> c", "[TOOL_CALLS]", "``` {d}", "[THINK]"]


def parser(name: str) -> Parser:
    return parser_for(name, None, [SAY], None)


def test_there_is_a_form_of_every_parser() -> None:
    assert set(FORMS) == set(PARSERS)


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
@settings(max_examples=40)
def test_every_call_beside_thoughts_is_read_in_its_order_and_none_in_them(name: str, data: st.DataObject) -> None:
    right, wrong = FORMS[name]
    opening, closing = THOUGHT[name]
    parts, meant, kinds = list[str](), list[str | None](), list[str]()
    for kind in data.draw(st.lists(st.sampled_from(["said", "right", "wrong", "thought"]), max_size=6)):
        text = data.draw(st.sampled_from(TEXTS))
        if kind == "wrong" and not wrong:
            continue
        if kind == "thought":  # the first closing mark ends it, and a call in it is none
            inside = data.draw(st.sampled_from(["hm", opening, right % "a", wrong]))
            parts.append(f"{opening}{inside if name != 'gptoss' else 'hm'}{closing}")
        elif kind == "said":
            parts.append(SAID[name])
        else:
            parts.append(right % text if kind == "right" else wrong)
            meant.append(text if kind == "right" else None)
        kinds.append(kind)
    response = "".join(parts)
    pieces = list(parser(name).pieces(response))
    assert "".join(piece.text for piece in pieces) == response
    calls = [call for piece in pieces for call in piece.calls]
    assert [None if isinstance(call, BadCall) else call.arguments["text"] for call in calls] == meant
    assert parser(name).parse(response).calls == tuple(calls)
    thought = [piece.text for piece in pieces if piece.kind == "thought"]
    assert thought == [part for part, kind in zip(parts, kinds) if kind == "thought"]


@pytest.mark.parametrize("name", FORMS)
@given(said=st.lists(st.sampled_from([*"<>/[]{}()\"':,= a1\n", *TEXTS, "%"]), max_size=20).map("".join))
@settings(max_examples=25)
def test_the_pieces_of_any_text_are_the_text(name: str, said: str) -> None:
    right, wrong = FORMS[name]
    for form in ("%", right, wrong, THOUGHT[name][0]):
        text = said.replace("%", form)
        for begun in (None, "</think>"):
            reads = parser(name)
            reads.thoughts = Thoughts(reads.thoughts.marks, begun)
            pieces = list(reads.pieces(text))
            assert "".join(piece.text for piece in pieces) == text and all(piece.text for piece in pieces)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "gptoss"])
def test_a_thought_that_does_not_end_holds_no_call(name: str) -> None:
    opening, closing = THOUGHT[name]
    call = FORMS[name][0] % "a"
    for begin in (opening, f"{opening}a{closing}{opening}", f"{opening}{opening}"):
        assert parser(name).parse(f"{begin}I could {call} but wait").calls == ()
    reads = parser(name)
    reads.thoughts = Thoughts(reads.thoughts.marks, closing)
    assert reads.parse(f"I could {call} but wait").calls == ()
    assert reads.parse(f"I could {call}{closing}{call}").calls == (ToolCall("say", {"text": "a"}),)


# ---------------------------------------------------------------------------------------------------- who marks them


@pytest.mark.parametrize(
    ("template", "kwargs", "begun"),
    [
        ("qwen3", {}, None),
        ("qwen3", {"enable_thinking": False}, None),
        ("qwen3_5_think", {}, "</think>"),
        ("qwen3_5_think", {"enable_thinking": False}, None),
        ("qwen3_5_nothink", {"enable_thinking": True}, "</think>"),
        ("nemotron_3_nano", {}, "</think>"),
        ("deepseekv3", {}, "</think>"),
        ("gemma4", {}, None),
        ("llama3_1", {}, None),
    ],
)
def test_the_generation_prompt_says_whether_a_response_begins_in_a_thought(
    template: str, kwargs: dict[str, Any], begun: str | None
) -> None:
    tokenizer, _ = tokenizer_of(template)
    assert parser_for("auto", tokenizer, [SAY], None, kwargs).thoughts.begun == begun
    assert parser_for("auto", tokenizer, [SAY], None, None).thoughts.begun is None, "prompts that are texts begin none"


@pytest.mark.parametrize(
    ("template", "marks", "begun"),
    [
        ("{{ messages[0].content }}<seed:think>", ("<seed:think>", "</seed:think>"), "</seed:think>"),
        ("<think>{{ messages[0].content }}: <reasoning>\nSo", ("<reasoning>", "</reasoning>"), "</reasoning>"),
        ("{{ messages[0].content }}{# [THINK] #}", BRACKETS, None),
        ("{{ messages[0].content }}<think>a</think>", THINK, None),
        ("{{ nothing.at.all }}<think>", THINK, None),
    ],
)
def test_marks_are_those_that_the_template_knows(template: str, marks: tuple[str, str], begun: str | None) -> None:
    tokenizer = copy.deepcopy(tokenizer_of("qwen3")[0])
    tokenizer.chat_template = template
    found = Thoughts().of(tokenizer, {})
    assert marks in found.marks and THINK in found.marks and found.begun == begun


def say(text: str) -> str:
    """Say it.

    Args:
        text: What.
    """
    return text


def test_an_episode_runs_no_call_of_a_thought_that_the_template_began() -> None:
    tokenizer, ends = tokenizer_of("qwen3_5_think")
    call = FORMS["qwen3_5"][0] % "</think> a"

    def talk(**kwargs: Any) -> Talk:
        factory = FunctionTools([say], max_turns=2, max_tokens=900, max_observation_tokens=50)
        made = Interaction(factory, tokenizer, eos_ids=ends, chat=True, template_kwargs=kwargs)
        return Talk(made, asked([{"role": "user", "content": "hi"}]), [0])

    thinking = talk()
    assert thinking.heard(0, f"I could {call} but wait") is None
    (episode,) = thinking.over()
    assert (episode.calls, episode.end) == (0, "answered")
    batch = asked([{"role": "user", "content": "hi"}], chat_template_kwargs=[{"enable_thinking": False}])
    of_a_row = Talk(talk()._interaction, batch, [0])
    for each, said in ((of_a_row, call), (talk(), f"hm</think>\n\n{call}"), (talk(enable_thinking=False), call)):
        assert "</think> a" in (each.heard(0, said) or "")


# ---------------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "glm4moe", "gemma4", "llama3_1", "nemotron_3_nano"])
def test_transformers_reads_the_same_calls_by_the_templates_of_trl(template: str) -> None:
    """What TRL's template of Nemotron takes for said, a thought that does not end, is kept from it."""
    tokenizer = copy.deepcopy(tokenizer_of(template)[0])
    ours = parser_for("auto", tokenizer, [SAY], None)
    theirs = parser_for("auto", add_response_schema(tokenizer), [SAY], None)
    call = FORMS[next(name for name in FORMS if type(parser(name)) is type(ours))][0].removeprefix("<|python_tag|>")
    opening, closing = ("<|channel>thought\n", CHANNEL[1]) if template == "gemma4" else THINK
    begin = closing if ours.thoughts.begun else ""
    responses = [begin, f"{begin}Fine.", begin + call % "a", f"{begin}So. {call % 'a'}", begin + call % "b <x> c"]
    responses += [f"I could {call % 'a'} but wait"] if ours.thoughts.begun else []
    if template == "llama3_1":
        responses = [f"{each}<|eot_id|>" for each in responses]
    elif template != "nemotron_3_nano":
        thought = f"{opening}\nhm{call % 'no'}{closing}\n\n"
        responses += [
            begin + thought + call % "a",
            begin + call % "a" + thought + "Fine.",
            f"{begin}{opening}{call % 'a'}",
        ]
    for response in responses:
        assert ours.parse(response.removesuffix("<|eot_id|>")).calls == theirs.parse(response).calls, response


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "gemma4"])
def test_a_call_that_a_response_template_cannot_read_takes_no_other_with_it(template: str) -> None:
    tokenizer = add_response_schema(copy.deepcopy(tokenizer_of(template)[0]))
    name = {"qwen3": "hermes", "qwen3_5_think": "qwen3_5", "gemma4": "gemma4"}[template]
    right = FORMS[name][0]
    wrong = {"gemma4": "<|tool_call>call:say{text:}<tool_call|>"}.get(template, "<tool_call>{</tool_call>")
    begin = "hm</think>" if template == "qwen3_5_think" else ""
    read = parser_for("auto", tokenizer, [SAY], None).parse(f"{begin}So. {right % 'a'}{wrong}{right % 'b'}")
    first, bad, last = read.calls if template != "qwen3_5_think" else (read.calls[0], None, read.calls[-1])
    assert (first, last) == (ToolCall("say", {"text": "a"}), ToolCall("say", {"text": "b"}))
    assert bad is None or isinstance(bad, BadCall)
    assert template == "qwen3_5_think" or "So." in read.content


def test_a_call_that_cannot_be_read_keeps_its_words() -> None:
    response = 'So. <tool_call>{"name": </tool_call>'
    turn = parser("hermes").parse(response)
    assert "".join([turn.content, " ", *(call.text for call in turn.calls if isinstance(call, BadCall))]) == response
    assert json.dumps([call.why for call in turn.calls if isinstance(call, BadCall)]).count("no JSON") == 1
