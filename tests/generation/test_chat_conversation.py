"""A completion over OpenAI's API: what was drawn stays what is learned from, whatever the agent sends back."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
from lit_rl.generation.rollout_function import ReturnedRow, read_messages

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


def conversation(max_tokens: int = 400, max_branches: int = 1) -> ChatConversation:
    encode = functools.partial(encode_prompt, tokenizer())
    reading = ChatReading(tokenizer(), encode, {}, frozenset([tokenizer().eos_token_id]), parser="hermes")
    return ChatConversation(reading, max_tokens, max_branches)


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


# ------------------------------------------------------------------ agents that do not go on with one text

SUMMARY = {"role": "user", "content": "1+1? (said: 2)"}
SURE = {"role": "user", "content": "sure?"}


def whole(talk: ChatConversation, *messages: dict[str, Any]) -> list[int]:
    """What the chat template makes of a request."""
    return talk.reading.prompt(ChatRequest([*messages]))


def asked(talk: ChatConversation, *messages: dict[str, Any]) -> list[int]:
    """The tokens that the policy reads for a request of these messages."""
    return talk.ask(read_request(json.dumps({"messages": messages}).encode()))[0]


def test_a_shortened_history_is_another_text_and_what_was_drawn_stays() -> None:
    talk = conversation(max_branches=2)
    first = asked(talk, *ASKED)
    said = say(talk, "2")
    assert asked(talk, SUMMARY) == whole(talk, SUMMARY)
    say(talk, "two")
    shared = talk.follows[len([*said["content"], "end"])]
    assert shared < -1 and first[: shared + len(first) + 1] == whole(talk, SUMMARY)[: shared + len(first) + 1]
    assert [tokenizer().decode(talk.tree.text(end)) for end in (1, talk.tree.last)] == [
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>",
        "<|im_start|>user\n1+1? (said: 2)<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>",
    ]
    assert talk.messages == [said, SUMMARY, {"role": "assistant", "content": "two"}]
    third = [SUMMARY, {"role": "assistant", "content": "two"}, SURE]
    assert tokenizer().decode(asked(talk, *third)).endswith("two<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n")  # fmt: skip  # noqa: E501
    assert talk.tree.branches == 2, "it goes on"


def test_an_earlier_turn_is_gone_on_from_and_its_tokens_are_those_that_were_drawn() -> None:
    """Not those of the template, which would write the turn without its blanks."""
    talk = conversation(max_branches=3)
    asked(talk, *ASKED)
    said = say(talk, " 2 ")
    read = asked(talk, *ASKED, said, SURE)
    say(talk, "yes")
    other = asked(talk, *ASKED, said, {"role": "user", "content": "sorry?"})
    assert tokenizer().decode(other).endswith("assistant\n 2 <|im_end|>\n<|im_start|>user\nsorry?<|im_end|>\n<|im_start|>assistant\n")  # fmt: skip  # noqa: E501
    say(talk, "no")
    count = len(talk.completion_ids)
    assert asked(talk, *ASKED, said, SURE) == read, "drawn again"
    say(talk, "yes")
    assert len(talk.completion_ids) == count + 4, "what is read stands there already"
    assert talk.tree.branches == 3 and sum(talk.written) == 4 + 4 + 3 + 4
    assert [each["content"] for each in talk.messages] == [" 2 ", "sure?", "yes", "sorry?", "no", "sure?", "yes"]


def test_a_turn_without_its_thoughts_is_read_and_not_learned_again() -> None:
    talk = conversation(max_branches=2)
    asked(talk, *ASKED)
    say(talk, "<think>hm</think>2")
    bare = {"role": "assistant", "content": "2"}
    assert asked(talk, *ASKED, bare, SURE) == whole(talk, *ASKED, bare, SURE)
    say(talk, "yes")
    learned = [token for token, ours in zip(talk.completion_ids, talk.written) if ours]
    assert tokenizer().decode(learned) == "<think>hm</think>2<|im_end|>yes<|im_end|>"
    assert talk.messages[1:] == [{"role": "user", "name": "assistant", "content": "2"}, SURE, {"role": "assistant", "content": "yes"}]  # fmt: skip  # noqa: E501


def test_other_tools_begin_another_text() -> None:
    talk = conversation(max_branches=2)
    asked(talk, *ASKED)
    said = say(talk, "2")
    ids, _ = talk.ask(request(said, SURE, tools=True))
    assert tokenizer().decode(ids).startswith("['add']\n")
    assert say(talk, CALL)["tool_calls"], "and its calls are read"


def test_a_text_beyond_the_limit_is_refused_with_the_limit_and_those_that_are_there_go_on() -> None:
    talk = conversation(max_branches=2)
    asked(talk, *ASKED)
    said = say(talk, "2")
    asked(talk, SUMMARY)
    say(talk, "two")
    with pytest.raises(ChatRequestRefused, match="env.max_branches=2 .*number 3") as refused:
        asked(talk, {"role": "user", "content": "3"})
    assert json.loads(refused.value.body)["error"]["code"] == "max_branches"
    assert talk.full and not talk.ended and talk.limit == "max_branches"
    asked(talk, *ASKED, said, SURE)
    say(talk, "yes")
    assert talk.ended and talk.limit is None and talk.tree.branches == 2


def test_each_text_has_its_own_room() -> None:
    talk = conversation(max_tokens=50, max_branches=2)
    prompt = len(asked(talk, *ASKED))
    say(talk, "2" * 40)
    long = {"role": "user", "content": "1+1?" + "!" * 20}
    ids, room = talk.ask(read_request(json.dumps({"messages": [long]}).encode()))
    assert len(ids) == prompt + 20 and room == 50 - 20, "a longer beginning takes from it"
    say(talk, "3")
    short = conversation(max_tokens=50, max_branches=2)
    asked(short, *ASKED)
    say(short, "2" * 40)
    assert short.ask(read_request(b'{"messages": [{"role": "user", "content": "1"}]}'))[1] == 50


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_an_agent_sends_each_turn_is_learned_once_behind_what_was_read(data: st.DataObject) -> None:
    """Random agents: they go on, branch off from any turn, begin anew, leave out what was said, ask the same again."""
    talk, histories, learned = conversation(max_tokens=10_000, max_branches=100), [list(ASKED)], list[list[int]]()
    words, end = st.sampled_from(["a", "b", "ab", " a"]), tokenizer().eos_token_id
    for number in range(data.draw(st.integers(2, 6))):
        history = list(data.draw(st.sampled_from(histories)))
        if number and history[-1]["role"] == "assistant":
            history.append({"role": "user", "content": data.draw(words)})
        if number and data.draw(st.booleans()) and len(history) > 2:
            history = [{**history[0], "content": data.draw(words)}, *history[2:]]
        ids = asked(talk, *history)
        if number and all(each["role"] == "user" for each in history):
            assert ids == whole(talk, *history)
        text = data.draw(words)
        before = len(talk.written)
        turn = say(talk, text)
        drawn = [*tokenizer()(text, add_special_tokens=False)["input_ids"], end]
        learned.append([*ids, *drawn])
        assert talk.tree.text(talk.tree.last) == learned[-1]
        assert talk.written[before:] == [0] * (len(talk.written) - before - len(drawn)) + [1] * len(drawn)
        histories.append([*history, turn])
    row = ReturnedRow(talk.prompt_ids, talk.completion_ids, talk.logprobs, list(map(bool, talk.written)), None, talk.follows)  # fmt: skip  # noqa: E501
    assert len(row.branches) == talk.tree.branches
    own = [place for branch in row.branches for place in branch.own]
    assert sorted(own) == [place for place, ours in enumerate(talk.written) if ours], "each once"
    assert sum(message["role"] == "assistant" for message in talk.messages) == row.turns[-1] + 1 == talk.turns
    assert read_messages(talk.messages, talk.turns), "as rewards get them"
