"""A completion over OpenAI's API: what was drawn stays what is learned from, whatever the agent sends back."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from lit_rl.core.model_paths import TINY
from lit_rl.data.rendering import encode_prompt
from lit_rl.generation.chat_conversation import (
    ChatConversation,
    ChatReading,
    ChatRequest,
    ChatRequestRefused,
    read_request,
)

TEMPLATE = (
    "{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | list }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ASKED = [{"role": "user", "content": "1+1?"}]


@functools.cache
def tokenizer() -> Any:
    made: Any = AutoTokenizer.from_pretrained(TINY)
    made.chat_template = TEMPLATE
    return made


def conversation(max_tokens: int = 400) -> ChatConversation:
    encode = functools.partial(encode_prompt, tokenizer())
    reading = ChatReading(tokenizer(), encode, {}, frozenset([tokenizer().eos_token_id]), parser="hermes")
    return ChatConversation(reading, max_tokens)


def request(*messages: dict[str, Any], tools: bool = False, **more: Any) -> ChatRequest:
    return read_request(
        json.dumps({"messages": [*ASKED, *messages], **({"tools": [TOOL]} if tools else {}), **more}).encode()
    )


def say(talk: ChatConversation, text: str, *, ended: bool = True) -> dict[str, Any]:
    """The policy's turn, as the agent reads it."""
    ids = [*tokenizer()(text, add_special_tokens=False)["input_ids"], *[tokenizer().eos_token_id] * ended]
    return talk.answer(ids, [-1.0] * len(ids), ended=ended).message


def test_turns_stand_behind_each_other_with_what_answered_them_between() -> None:
    talk = conversation()
    ids, room = talk.ask(request())
    assert tokenizer().decode(ids) == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n" and room == 400
    asked = len(ids)
    first = say(talk, " 2 ")
    assert first == {"role": "assistant", "content": " 2 "}
    ids, room = talk.ask(request(first, {"role": "user", "content": "sure?"}))
    between = "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer().decode(ids).endswith(f"assistant\n 2 <|im_end|>{between}")
    say(talk, "yes", ended=False)
    written = [token for token, ours in zip(talk.completion_ids, talk.written) if ours]
    assert tokenizer().decode(written) == " 2 <|im_end|>yes" and talk.turns == 2 and not talk.ended
    assert tokenizer().decode(talk.completion_ids) == f" 2 <|im_end|>{between}yes"
    assert [value for value, ours in zip(talk.logprobs, talk.written) if not ours] == [0.0] * (len(ids) - asked - 4)


def test_the_last_request_has_its_answer_until_something_newer_is_asked() -> None:
    talk, first = conversation(), request()
    assert talk.answered(first) is None
    talk.ask(first)
    said = say(talk, "2")
    again = talk.answered(request())
    assert again is not None and again.message == said and talk.answered(request(max_tokens=3)) is None
    talk.ask(request(said, {"role": "user", "content": "sure?"}))
    assert talk.answered(first) is None, "a newer one waits"


def test_a_turn_that_was_cut_is_closed_before_it_is_answered() -> None:
    talk = conversation()
    talk.ask(request())
    said = say(talk, "be", ended=False)
    ids, _ = talk.ask(request(said, {"role": "user", "content": "go"}))
    assert tokenizer().decode(ids).endswith("be<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n")
    say(talk, "x")
    assert tokenizer().decode([t for t, ours in zip(talk.completion_ids, talk.written) if ours]) == "bex<|im_end|>"


def test_calls_of_tools_are_those_that_the_policy_wrote_and_their_answers_stand_behind_them() -> None:
    talk = conversation()
    ids, _ = talk.ask(request(tools=True))
    assert tokenizer().decode(ids).startswith("['add']\n")
    said = say(talk, f"hm {CALL}{CALL}")
    assert [json.loads(call["function"]["arguments"]) for call in said["tool_calls"]] == [{"a": 1}] * 2
    assert said["content"] == "hm" and len({call["id"] for call in said["tool_calls"]}) == 2
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "content": str(n)} for n, call in enumerate(said["tool_calls"])
    ]
    ids, _ = talk.ask(request(said, *answers, tools=True))
    text = tokenizer().decode(ids)
    assert f"hm {CALL}{CALL}<|im_end|>" in text, "as it was written, not as it would be rendered"
    assert text.endswith("<|im_start|>tool\n0<|im_end|>\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n")
    assert say(talk, "2") == {"role": "assistant", "content": "2"}
    with pytest.raises(ChatRequestRefused, match="answers the call 'other'"):
        talk.ask(request(said, *answers, {"role": "assistant", "content": "2"},
                         {"role": "tool", "tool_call_id": "other", "content": "3"}, tools=True))  # fmt: skip


def test_what_was_said_is_kept_as_messages_as_templates_know_them() -> None:
    """One of the policy for each stretch of its tokens, and the answers with the names of their tools."""
    talk = conversation()
    talk.ask(request(tools=True))
    said = say(talk, f"hm {CALL}")
    (call,) = said["tool_calls"]
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    talk.ask(request(said, answer, tools=True))
    assert len(talk.messages) == 1, "what was not answered yet was not said"
    say(talk, "two")
    function = {"name": "add", "arguments": {"a": 1}}
    assert talk.messages == [
        {"role": "assistant", "content": "hm", "tool_calls": [{**call, "function": function}]},
        {"role": "tool", "name": "add", "tool_call_id": call["id"], "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    assert said["tool_calls"][0]["function"]["arguments"] == '{"a": 1}', "the agent reads JSON, as OpenAI writes it"


def test_turns_with_nothing_between_them_are_one() -> None:
    """By its tokens a completion has as many turns as messages of the assistant, whatever the template leaves out."""
    bare: Any = AutoTokenizer.from_pretrained(TINY)
    bare.chat_template = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"  # fmt: skip  # noqa: E501
    reading = ChatReading(bare, functools.partial(encode_prompt, bare), {}, frozenset([bare.eos_token_id]))
    talk = ChatConversation(reading, 400)
    talk.ask(request())
    said = [say(talk, "2")]
    talk.ask(request(said[0], {"role": "user", "content": ""}))
    said.append(say(talk, "3"))
    assert talk.written == [1] * 4 and talk.messages == [{"role": "assistant", "content": "23"}]
    talk.ask(request(said[0], {"role": "user", "content": ""}, said[1], {"role": "user", "content": "?"}))
    say(talk, "4")
    assert [message["content"] for message in talk.messages] == ["23", "?", "4"] and 0 in talk.written


def test_calls_that_are_text_need_no_template_that_renders_calls() -> None:
    plain: Any = AutoTokenizer.from_pretrained(TINY)
    plain.chat_template = TEMPLATE.replace("{% for c in m.tool_calls or [] %}", "{% for c in [] %}")
    reading = ChatReading(
        plain, functools.partial(encode_prompt, plain), {}, frozenset([plain.eos_token_id]), parser="regex"
    )
    talk = ChatConversation(reading, 400)
    talk.ask(request(tools=True))
    said = say(talk, "add()")
    (call,) = said["tool_calls"]
    ids, _ = talk.ask(request(said, {"role": "tool", "tool_call_id": call["id"], "content": "7"}, tools=True))
    assert plain.decode(ids).endswith("add()<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")


def test_what_is_no_call_is_text() -> None:
    talk = conversation()
    talk.ask(request(tools=True))
    assert say(talk, '<tool_call>{"name": ') == {"role": "assistant", "content": '<tool_call>{"name": '}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (
            [{"role": "assistant", "content": "two"}, {"role": "user", "content": "?"}],
            r"message 1 was .*\"2\".*\"two\"",
        ),
        ([{"role": "assistant", "content": "2"}], "expected, got none"),
        ([], "expected, got none"),
        ([{"role": "assistant", "content": "2"}, {"role": "system", "content": "?"}], r"expected, got \['system'\]"),
    ],
)
def test_what_is_no_next_turn_is_refused(messages: list[dict[str, Any]], words: str) -> None:
    talk = conversation()
    talk.ask(request())
    with pytest.raises(ChatRequestRefused, match="one turn of a completion at a time"):
        talk.ask(request())
    say(talk, "2")
    with pytest.raises(ChatRequestRefused, match=words):
        talk.ask(request(*messages))
    talk.ask(request({"role": "assistant", "content": "2"}, {"role": "user", "content": "?"}))


def test_without_room_there_is_no_turn() -> None:
    talk = conversation(max_tokens=50)
    assert talk.ask(request())[1] == 50
    said = say(talk, "2")
    with pytest.raises(ChatRequestRefused, match="env.max_tokens=50") as refused:
        talk.ask(request(said, {"role": "user", "content": "?" * 30}))
    assert json.loads(refused.value.body)["error"]["code"] == "context_length_exceeded" and not talk.ended
    assert len(talk.completion_ids) == 2, "what nobody answered is not in it"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "not JSON"),
        ("[]", "a list of messages"),
        ('{"messages": []}', "a list of messages"),
        ('{"messages": [{"role": "user", "content": "a"}], "n": 2, "stop": ["b"]}', "n, stop cannot be asked"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "is no text"),
        ('{"messages": [{"role": "wizard", "content": "a"}]}', "is not a chat message"),
        ('{"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}', "no number of tokens"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "web"}]}', "no function"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": 3}', "tools=3 is not a list"),
        ('{"messages": [{"role": "assistant", "tool_calls": "x"}]}', "tool_calls='x' is not a list"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}', "is no call of a function"),
    ],
)
def test_what_cannot_be_kept_is_refused(body: str, words: str) -> None:
    with pytest.raises(ChatRequestRefused, match=words):
        read_request(body.encode())


def test_texts_in_parts_are_texts_and_the_smaller_limit_holds() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    read = read_request(
        json.dumps(
            {"messages": [{"role": "developer", "content": parts}], "max_tokens": 9, "max_completion_tokens": 5}
        ).encode()
    )
    assert read.messages == [{"role": "system", "content": "ab"}] and read.max_new_tokens == 5
