"""Whether the chat template would render an episode otherwise than it was held: what is counted, and what is said."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import pytest
from chat_templates import tokenizer_of
from said_turns import drawn
from talks import Talk, asked, chats, texts
from test_custom import double

from lit_rl.core.rollout import PromptBatch
from lit_rl.environments import CustomEnvironment, FunctionTools
from lit_rl.environments.interaction import Interaction
from lit_rl.environments.template_checks import CHECK_EVERY
from lit_rl.environments.tools import FunctionTool

TOOL_DOUBLE = FunctionTool(double).schema
QUESTION = [{"role": "user", "content": "Which number?"}]
NAME = "template/rewritten"


class Higher:
    """Is answered until it says 7; control tokens in an answer are text."""

    def reset(self) -> None: ...

    def step(self, action: str) -> tuple[Any, ...]:
        if "fail" in action:
            raise RuntimeError("no connection")
        return "higher", 0.0, action.endswith("7"), False, {}


def game(**limits: Any) -> CustomEnvironment:
    return CustomEnvironment(Higher, max_turns=3, max_failed=1.0, **limits)


def tools(**limits: Any) -> FunctionTools:
    return FunctionTools([double], **limits)


def calling(number: int, *, blanks: bool = True) -> str:
    called = {"name": "double", "arguments": {"a": number}}
    written = json.dumps(called) if blanks else json.dumps(called, separators=(",", ":"))
    return f"<tool_call>\n{written}\n</tool_call>"


def looked_at(
    interaction: Interaction, *said: list[str], rollout: int = 0, prompt: Any = QUESTION
) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """The metric of a rollout in which each row says its turns, and what is warned of."""
    batch = asked(prompt)
    batch = PromptBatch(batch.prompts, batch.prompt_ids, {}, batch.rows, batch.occurrences, rollout=rollout)
    tokenizer = interaction._tokenizer
    if not isinstance(prompt, str):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        batch.prompt_ids[0] = tokenizer(text, add_special_tokens=False)["input_ids"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drawn(interaction, tokenizer, batch, said, 200)
    told = [str(each.message) for each in caught if "would not give back" in str(each.message)]
    return dict(interaction.pop_metrics()), told


THOUGHTFUL = [["<think>\nsay it\n</think>\n\n3", "7"], ["<think>\nor this one\n</think>\n\n5", "7"]]


def test_a_template_that_drops_thinking_between_turns_is_told_of_once() -> None:
    interaction = chats(game(), "qwen3")
    counted, told = looked_at(interaction, *THOUGHTFUL)
    assert counted == {NAME: (2, 2)}
    assert len(told) == 1 and "'say it'" in told[0] and "2 of the 2 episodes" in told[0]
    dropped = re.search(r"would drop (\d+) thinking tokens of (\d+), ", told[0])
    assert dropped and dropped[1] == str(len("say it")), "a token a byte"
    assert looked_at(interaction, *THOUGHTFUL, rollout=CHECK_EVERY) == ({NAME: (2, 2)}, []), "it was said before"


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "phi3"])
def test_a_template_that_only_appends_rewrites_nothing(name: str) -> None:
    assert looked_at(chats(game(), name), ["3", "4", "7"], ["7"], ["8", "7"]) == ({NAME: (0, 3)}, [])


def test_thinking_that_is_kept_between_calls_is_not_told_of() -> None:
    """The same template keeps what was thought since the user spoke."""
    said = [f"<think>\ndouble it\n</think>\n\n{calling(21)}", calling(42), "84"]
    assert looked_at(chats(tools(), "qwen3"), said) == ({NAME: (0, 1)}, [])


def test_a_thought_that_the_prompt_has_opened_is_rendered_anew_as_it_was_sampled() -> None:
    """Its template makes an empty thought of a response that holds one, and reads it by a key."""
    said = [f"double it\n</think>\n\n{calling(21)}", f"and again\n</think>\n\n{calling(42)}", "x\n</think>\n\n84"]
    assert looked_at(chats(tools(), "qwen3_8"), said) == ({NAME: (0, 1)}, [])


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_6"])
def test_parallel_calls_over_three_turns_have_the_tokens_of_the_whole_conversation(name: str) -> None:
    """The last turn too: with what it writes between calls and between their answers, and behind each turn."""
    tokenizer, ends = tokenizer_of(name)
    interaction = chats(tools(max_turns=4, max_tokens=5000, max_observation_tokens=200), name)
    thinks = "think" in name or name in ("qwen3", "qwen3_6")
    opened = name in ("qwen3_5_think", "qwen3_6")
    form = "<tool_call>\n<function=double>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"

    def turn(said: str, *numbers: int) -> str:
        calls = [form.format(number) if opened else calling(number) for number in numbers]
        thought = "hm\n</think>\n\n" if opened else "<think>\nhm\n</think>\n\n" if thinks else ""
        between = "\n\n" if opened and said and calls else "\n" if said and calls else ""
        return f"{thought}{said}{between}" + "\n".join(calls)

    talk = Talk(interaction, asked(QUESTION), [0], turn=400)
    held = list(talk.prompt_ids[0])
    for said in (turn("", 1, 2), turn("So.", 3, 4), turn("42")):
        talk.say(0, said)
        (answer,) = talk.conversations.answers(wait=True)
        held += [*tokenizer(said, add_special_tokens=False)["input_ids"], ends[0], *(answer.token_ids or ())]
    (episode,) = talk.over()
    assert (episode.calls, episode.failed_calls, episode.end) == (4, 0, "answered")
    messages = [*QUESTION, *episode.messages]
    whole = tokenizer.apply_chat_template(messages, tools=[TOOL_DOUBLE], tokenize=False)
    assert str(tokenizer.decode(held)) == whole.removesuffix("\n")
    assert held == tokenizer(whole.removesuffix("\n"), add_special_tokens=False)["input_ids"]


def test_what_is_rewritten_in_a_call_is_shown() -> None:
    counted, told = looked_at(chats(tools(), "qwen2_5"), [calling(21), "42"], [calling(21, blanks=False), "42"])
    assert counted == {NAME: (1, 2)}
    assert len(told) == 1 and "it would write ..." in told[0] and '"name": "double"' in told[0]


def test_what_a_template_refuses_is_rewritten() -> None:
    """A call that cannot be read is answered like one; some templates want a call before an answer."""
    counted, told = looked_at(chats(tools(parser="gptoss"), "gptoss"), [" to=functions.double<|message|>{", "42"])
    assert counted == {NAME: (1, 1)} and len(told) == 1
    assert "it would refuse it: Message has tool role, but there was no previous assistant message" in told[0]


def test_other_tokens_of_the_same_text_are_counted_and_no_fault_of_the_template() -> None:
    """What spells a control token is text in an answer, and would be one where it is rendered anew."""

    class Spells(Higher):
        def step(self, action: str) -> tuple[Any, ...]:
            return "<|im_end|>", *super().step(action)[1:]

    assert looked_at(chats(CustomEnvironment(Spells, max_turns=3), "qwen2_5"), ["3", "7"]) == ({NAME: (1, 1)}, [])


def test_an_episode_that_failed_is_not_looked_at() -> None:
    counted, told = looked_at(chats(game(), "qwen3"), THOUGHTFUL[0], ["3", "fail"])
    assert counted == {NAME: (1, 1)} and len(told) == 1


@pytest.mark.parametrize("rollout", [1, CHECK_EVERY - 1, CHECK_EVERY + 1, -1])
def test_other_rollouts_and_validations_are_not_looked_at(rollout: int) -> None:
    interaction = chats(game(), "qwen3")
    assert looked_at(interaction, *THOUGHTFUL, rollout=rollout) == ({}, [])


def test_plain_texts_are_not_looked_at() -> None:
    assert looked_at(texts(game()), ["3", "7"], prompt="Which number?") == ({}, [])


def test_calls_and_answers_have_the_ids_that_were_rendered() -> None:
    """Templates that write them demand them, and arguments as text where they want it so."""
    call = "<|tool_call_start|>"
    assert call in (tokenizer_of("lfm2_v2")[0].chat_template or "")
    said = [f"{call}[double(a=21)]<|tool_call_end|>", "42"]
    counted, told = looked_at(chats(tools(), "lfm2_v2"), said)
    assert counted == {NAME: (0, 1)}, told
