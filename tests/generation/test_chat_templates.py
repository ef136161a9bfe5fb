"""Agents over OpenAI's API and the chat templates of real families: channels, example calls, tools that are told."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from chat_templates import tokenizer_of

from lit_rl.core.errors import ConfigError
from lit_rl.data.rendering import encode_prompt
from lit_rl.generation.chat_conversation import (
    ChatConversation,
    ChatReading,
    ChatRequest,
    ChatRequestRefused,
    ChatTurn,
    read_request,
)

ASKED = {"role": "user", "content": "Double 21."}
TOOL = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Doubles.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "A number."}},
            "required": ["a"],
        },
    },
}
THOUGHT = "<|channel|>analysis<|message|>I double it.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>It is 42."
CALL = '<|channel|>commentary to=functions.double <|constrain|>json<|message|>{"a": 21}'


def talk(template: str, **settings: Any) -> ChatConversation:
    tokenizer, ends = tokenizer_of(template)
    reading = ChatReading(tokenizer, functools.partial(encode_prompt, tokenizer), {}, frozenset(ends), **settings)
    return ChatConversation(reading, 4000)


def request(*messages: dict[str, Any], tools: bool = True) -> ChatRequest:
    return read_request(json.dumps({"messages": messages, **({"tools": [TOOL]} if tools else {})}).encode())


def say(conversation: ChatConversation, text: str, end: str) -> ChatTurn:
    ids = conversation.reading.tokenizer(text + end, add_special_tokens=False)["input_ids"]
    return conversation.answer(ids, [-1.0] * len(ids), ended=True)


def text_of(conversation: ChatConversation, asked: ChatRequest) -> str:
    """What the policy reads."""
    return conversation.reading.tokenizer.decode(conversation.ask(asked)[0])


# ---------------------------------------------------------------------------------------------------- channels


@pytest.mark.parametrize("tools", [False, True])
def test_the_final_channel_is_the_content_and_thoughts_stand_apart(tools: bool) -> None:
    conversation = talk("gptoss")
    conversation.ask(request(ASKED, tools=tools))
    turn = say(conversation, f"{THOUGHT}{FINAL}", "<|return|>")
    thought = {"reasoning_content": "I double it.", "reasoning": "I double it."}
    assert turn.message == {"role": "assistant", "content": "It is 42.", **thought} and turn.finish == "stop"
    delta = json.loads(turn.events.split(b"\n\n")[0].removeprefix(b"data: "))["choices"][0]["delta"]
    assert delta == turn.message, "streams say the same"


def test_without_thoughts_there_is_no_field_of_them() -> None:
    conversation = talk("gptoss")
    conversation.ask(request(ASKED))
    assert say(conversation, FINAL, "<|return|>").message == {"role": "assistant", "content": "It is 42."}


def test_calls_stand_on_the_commentary_channel_and_what_the_policy_wrote_is_read_by_it_again() -> None:
    conversation = talk("gptoss")
    conversation.ask(request(ASKED))
    turn = say(conversation, f"{THOUGHT}{CALL}", "<|call|>")
    (call,) = turn.message["tool_calls"]
    assert call["function"] == {"name": "double", "arguments": '{"a": 21}'} and turn.finish == "tool_calls"
    assert (turn.message["content"], turn.message["reasoning_content"]) == ("", "I double it.")
    told = {"role": "assistant", "content": None, "tool_calls": [call]}  # clients drop what they do not know
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    assert f"{THOUGHT}{CALL}<|call|>" in text_of(conversation, request(ASKED, told, answer))
    assert say(conversation, FINAL, "<|return|>").message["content"] == "It is 42."
    kept = [(message["role"], message["content"], message.get("thinking")) for message in conversation.messages]
    assert kept == [("assistant", "", "I double it."), ("tool", "42", None), ("assistant", "It is 42.", None)]


# ---------------------------------------------------------------------------------------------------- example calls


def example(*numbers: int) -> list[dict[str, Any]]:
    """Calls of a tool in one turn and their answers, as the openai package sends them."""
    calls = [
        {"id": f"call_{n}xyz", "type": "function", "function": {"name": "double", "arguments": json.dumps({"a": n})}}
        for n in numbers
    ]
    answers = [{"role": "tool", "tool_call_id": f"call_{n}xyz", "content": str(2 * n)} for n in numbers]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    return [{"role": "user", "content": "Double 4."}, said, *answers, {"role": "assistant", "content": "8"}]


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "llama3_1", "gptoss", "glm4moe", "deepseekv3"])
def test_example_calls_of_a_prompt_are_rendered_as_calls_with_arguments(template: str) -> None:
    """As the template renders the same conversation with arguments as it wants them: DeepSeek's takes text."""
    conversation = talk(template, parser="hermes" if template == "llama3_1" else "auto")
    tokenizer = conversation.reading.tokenizer
    user, said, answer, final = example(4)
    (call,) = said["tool_calls"]
    wanted: Any = '{"a": 4}' if template == "deepseekv3" else {"a": 4}
    mapped = {**call, "id": "call00000", "function": {"name": "double", "arguments": wanted}}
    answered = {"role": "tool", "name": "double", "tool_call_id": "call00000", "content": "8"}
    meant = [user, {"role": "assistant", "content": "", "tool_calls": [mapped]}, answered, final, ASKED]
    tools = None if template == "deepseekv3" else [TOOL]  # its template tells of none
    rendered = tokenizer.apply_chat_template(meant, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text_of(conversation, request(user, said, answer, final, ASKED, tools=tools is not None)) == rendered
    assert '\\"a\\"' not in rendered


def test_answers_of_example_calls_keep_to_their_calls_in_whatever_order_they_come() -> None:
    """Gemma's template names the tool of an answer by the id of its call."""
    user, said, four, five, final = example(4, 5)
    said["tool_calls"][1]["function"]["name"] = "halve"
    text = text_of(talk("gemma4"), request(user, said, five, four, final, ASKED))
    assert 0 < text.index("response:halve") < text.index("response:double")


@pytest.mark.parametrize("written", ["{", "[4]", "null"])
def test_arguments_of_an_example_call_that_are_no_object_are_refused(written: str) -> None:
    user, said, *rest = example(4)
    said["tool_calls"][0]["function"]["arguments"] = written
    with pytest.raises(ChatRequestRefused, match="the arguments of a call of double are .* no JSON object"):
        talk("qwen2_5").ask(request(user, said, *rest, ASKED))


def test_an_example_answer_to_no_call_is_refused() -> None:
    user, said, answer, final = example(4)
    with pytest.raises(ChatRequestRefused, match="answers the call 'call_9'"):
        talk("qwen2_5").ask(request(user, said, answer | {"tool_call_id": "call_9"}, final, ASKED))


# ---------------------------------------------------------------------------------------------------- tools are told


def test_a_template_that_tells_of_no_tools_is_refused_when_tools_are_first_asked_for() -> None:
    conversation = talk("deepseekv3")
    with pytest.raises(ConfigError, match="does not tell the policy of the tools: double"):
        conversation.ask(request(ASKED))
    conversation.ask(request(ASKED, tools=False))


def test_tools_that_come_later_are_refused_for_nobody_told_the_policy() -> None:
    conversation = talk("qwen2_5")
    conversation.ask(request(ASKED, tools=False))
    said = say(conversation, "42", "<|im_end|>").message
    more = {"role": "user", "content": "Sure?"}
    with pytest.raises(ChatRequestRefused, match="first request, which did not contain double"):
        conversation.ask(request(ASKED, said, more))
    conversation.ask(request(ASKED, said, more, tools=False))
