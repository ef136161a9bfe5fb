"""gpt-oss speaks on channels: what was said is the final one's text, and what was thought stands apart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from chat_templates import names, tokenizer_of
from hypothesis import given
from hypothesis import strategies as st
from talks import chats, one
from test_custom import double

from lit_rl.environments import CustomEnvironment, FunctionTools
from lit_rl.environments.thoughts import speaks_on_channels, split_thoughts
from lit_rl.environments.tool_parsers import GptOssParser
from lit_rl.rewards import text_of

ASKED = [{"role": "user", "content": "Double 21."}]
THOUGHT = "<|channel|>analysis<|message|>I double it.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>It is 42."
CALL = '<|channel|>commentary to=functions.double <|constrain|>json<|message|>{"a": 21}'
AS_RENDERED = ' to=functions.double<|channel|>commentary json<|message|>{"a": 21}'


@pytest.mark.parametrize(
    "written",
    [
        f"{FINAL}<|return|>",
        f"{THOUGHT}{FINAL}<|return|>",
        f"{THOUGHT}{FINAL}",
        f"{THOUGHT}{AS_RENDERED}<|call|>",
        f"{AS_RENDERED}<|call|>",
        "<|channel|>analysis<|message|>I dou",
        "<|channel|>analysis<|message|>I double it.<|end|>",
        "<|channel|>final<|message|>\n  It is\n42. <|return|>",
    ],
)
def test_what_trl_reads_is_read_alike(written: str) -> None:
    """Its parse of the same tokens, with the template that its package ships."""
    from trl.chat_template_utils import add_response_schema, parse_response

    tokenizer = copy.deepcopy(tokenizer_of("gptoss")[0])
    add_response_schema(tokenizer)
    begun = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    prefix, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (begun, written))
    theirs = parse_response(tokenizer, ids, prefix=prefix)
    said, thought = split_thoughts(written)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in theirs.get("tool_calls") or ()]
    parsed = GptOssParser().parse(written)
    assert [(call.name, call.arguments) for call in parsed.calls] == calls  # type: ignore[union-attr]
    assert thought == (theirs.get("thinking") or "").strip()
    assert parsed.content == (theirs.get("content") or "").strip()
    assert calls or said == parsed.content


@pytest.mark.parametrize(
    ("written", "said", "thought"),
    [
        ("42", "42", ""),
        ("", "", ""),
        ("<|channel|>final", "", ""),
        ("<|channel|>commentary<|message|>I look.<|end|>", "I look.", ""),
        ("<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b", "b", "a"),
        (
            f"{THOUGHT}<|channel|>analysis<|message|>Twice.<|end|><|start|>assistant{FINAL}",
            "It is 42.",
            "I double it.\nTwice.",
        ),
    ],
)
def test_turns_that_models_write_otherwise(written: str, said: str, thought: str) -> None:
    assert split_thoughts(written) == (said, thought)


@given(st.text(st.characters(codec="utf-8", exclude_characters="<|>")))
def test_a_text_without_channels_is_said(text: str) -> None:
    assert split_thoughts(text) == (text.strip(), "")


def test_no_other_family_speaks_on_channels() -> None:
    assert [name for name in names() if speaks_on_channels(tokenizer_of(name)[0])] == ["gptoss"]


def test_messages_hold_what_was_said_and_apart_what_was_thought() -> None:
    """Where the chat template looks for it, which renders both."""
    interaction = chats(FunctionTools([double]), "gptoss")
    episode = one(interaction, f"{THOUGHT}{CALL}", f"{THOUGHT}{FINAL}", prompt=ASKED)
    called, answer, final = episode.messages
    assert (called["content"], called["thinking"]) == ("", "I double it.")
    assert called["tool_calls"][0]["function"] == {"name": "double", "arguments": {"a": 21}}
    assert answer["content"] == "42"
    assert final == {"role": "assistant", "content": "It is 42.", "thinking": "I double it."}
    assert text_of(episode.messages).strip() == "It is 42."
    rendered = tokenizer_of("gptoss")[0].apply_chat_template([*ASKED, final], tokenize=False)
    assert rendered.endswith(f"<|start|>assistant{THOUGHT}{FINAL}<|return|>")


def test_an_action_is_what_was_said() -> None:
    class Game:
        def reset(self) -> None: ...

        def step(self, action: str) -> tuple[Any, ...]:
            return "", float(action == "It is 42."), True, False, {}

    assert one(chats(CustomEnvironment(Game), "gptoss"), f"{THOUGHT}{FINAL}", prompt=ASKED).reward == 1
