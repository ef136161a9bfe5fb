"""Conversations: what a row is answered, when it is over, what fails, and what its seed decides."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from talks import Talk, asked, bytes_tokenizer, chats, one, texts

from lit_rl.environments import CustomEnvironment, FunctionTools
from lit_rl.environments.guess import GuessNumber
from lit_rl.episodes import Episode
from lit_rl.errors import ConfigError, GenerationError, RewardError

WRITTEN = {"parser": "regex"}
USER = [{"role": "user", "content": "What is 17 times 25?"}]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def say(text: str) -> str:
    """Say it again.

    Args:
        text: What.
    """
    return text


def tools(*functions: Any, **limits: Any) -> FunctionTools:
    return FunctionTools(functions or [multiply], **{**WRITTEN, **limits})


# ------------------------------------------------------------------ turns


def test_a_call_is_answered_and_a_turn_without_one_is_the_answer() -> None:
    talk = Talk(texts(tools()), asked("17*25="), [1])
    assert talk.heard(0, "multiply(17, 25)") == "425"
    assert talk.heard(0, "425") is None
    (episode,) = talk.over()
    said, answer, final = episode.messages
    assert said == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 17, "b": 25}}}],
    }
    assert answer == {"role": "tool", "name": "multiply", "content": "425"}
    assert final == {"role": "assistant", "content": "425"}
    assert (episode.end, episode.turns, episode.calls, episode.failed_calls) == ("answered", 2, 1, 0)
    assert episode.observed_tokens == 3 and episode.reward is None
    assert episode.transcript() == "assistant: multiply(a=17, b=25)\ntool: 425\nassistant: 425"


def test_a_chat_template_tells_of_the_tools_and_frames_the_answers() -> None:
    interaction = chats(FunctionTools([multiply]))
    talk = Talk(interaction, asked(USER), [1])
    told = interaction._tokenizer.decode(talk.prompt_ids[0])
    assert '"name": "multiply"' in told and told.endswith("<|im_start|>assistant\n")
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
    heard = talk.heard(0, f"I compute.\n{call}\n{call}")
    assert heard is not None
    assert heard.count("<tool_response>\n425\n</tool_response>") == 2 and heard.endswith("<|im_start|>assistant\n")
    assert talk.heard(0, "It is 425.") is None
    (episode,) = talk.over()
    assert [message["role"] for message in episode.messages] == ["assistant", "tool", "tool", "assistant"]
    assert episode.messages[0]["content"] == "I compute." and episode.calls == 2


def test_every_call_of_a_turn_has_one_answer_in_the_order_of_the_calls() -> None:
    said = "multiply(2,3) nothing(1) multiply(2,) multiply(2,'x') multiply(4,5)"
    episode = one(texts(tools()), said, prompt="?")
    answers = [message["content"] for message in episode.messages if message["role"] == "tool"]
    assert answers[0] == "6" and answers[-1] == "20" and all(text.startswith("error: ") for text in answers[1:-1])
    assert (episode.calls, episode.failed_calls, episode.unreadable_calls) == (5, 3, 2)
    assert "there is no tool 'nothing'" in answers[1]


def test_a_turn_that_was_cut_inside_a_call_is_told_so() -> None:
    talk = Talk(chats(FunctionTools([multiply])), asked(USER), [1])
    heard = talk.heard(0, '<tool_call>\n{"name": "multiply"', ended=False)
    assert heard is not None and heard.startswith("<|im_end|>") and "not closed" in heard
    assert talk.heard(0, "It is", ended=False) is None
    (episode,) = talk.over()
    assert (episode.end, episode.unreadable_calls) == ("cut", 1) and episode.cut


@pytest.mark.parametrize("ended", [True, False])
def test_a_turn_is_closed_once(ended: bool) -> None:
    talk = Talk(texts(tools()), asked("?"), [1])
    end = bytes_tokenizer().eos_token
    assert talk.heard(0, "multiply(2,3)", ended=ended) == ("6" if ended else f"{end}6")
    talk.conversations.close()


def test_text_that_spells_a_control_token_stays_text() -> None:
    interaction = texts(tools(say))
    talk = Talk(interaction, asked("?"), [1])
    end = interaction._tokenizer.eos_token
    talk.say(0, f'say("{end}")')
    (answer,) = talk.conversations.answers(wait=True)
    assert answer.token_ids and interaction._tokenizer.eos_token_id not in answer.token_ids
    assert talk.read(answer) == end
    talk.conversations.close()


# ------------------------------------------------------------------ limits


def test_the_last_turn_is_answered_in_the_transcript_only() -> None:
    episode = one(texts(tools(max_turns=2)), "multiply(2,3)", "multiply(4,5)", "never said")
    assert (episode.end, episode.turns) == ("max_turns", 2) and episode.cut
    assert episode.messages[-1]["content"] == "20" and episode.observed_tokens == 1


def test_an_episode_without_room_for_another_token_is_over() -> None:
    said = len("multiply(2,3)") + 1
    talk = Talk(texts(tools(max_tokens=said + 2)), asked("?"), [1], turn=20)
    talk.say(0, "multiply(2,3)")
    (answer,) = talk.conversations.answers(wait=True)
    assert answer.token_ids is not None and answer.room == 1
    talk.conversations.close()
    full = one(texts(tools(max_tokens=said + 1)), "multiply(2,3)")
    assert full.end == "max_tokens" and full.messages[-1]["content"] == "6" and full.observed_tokens == 0


def test_a_long_answer_is_cut_and_says_so() -> None:
    episode = one(texts(tools(say, max_observation_tokens=8)), 'say("abcdefghijkl")')
    assert episode.messages[-1]["content"] == "abcdefgh [cut: 4 more tokens]"


class Endless:
    def reset(self) -> None: ...

    def step(self, action: str) -> tuple[Any, ...]:
        return "more", 0.5, False, action == "stop", {}


@given(st.lists(st.sampled_from(["a", "bb", "ccc"]), max_size=9), st.integers(1, 5), st.integers(8, 40))
def test_no_episode_leaves_its_limits(said: list[str], max_turns: int, max_tokens: int) -> None:
    factory = CustomEnvironment(Endless, max_turns=max_turns, max_tokens=max_tokens, max_observation_tokens=4)
    talk = Talk(texts(factory), asked("?"), [1], turn=4)
    length, room = 0, 4
    for text in said:
        text = text[:room]
        length += len(text) + (len(text) < room)
        talk.say(0, text, ended=len(text) < room)
        (answer,) = talk.conversations.answers(wait=True)
        if answer.token_ids is None:
            break
        length, room = length + len(answer.token_ids), answer.room
        assert room >= 1 and length + room <= max_tokens
    (episode,) = talk.over()
    assert episode.turns <= max_turns and length <= max_tokens
    assert episode.reward == 0.5 * episode.turns if episode.turns else episode.reward is None


# ------------------------------------------------------------------ environments that are stepped


def test_a_game_is_stepped_and_rewards_its_turns() -> None:
    number = random.Random(7).randint(0, 9)
    episode = one(texts(CustomEnvironment(GuessNumber)), "x", str((number + 1) % 10), str(number), seed=7)
    hint = "<=" if (number + 1) % 10 > number else ">="
    assert [message["content"] for message in episode.messages if message["role"] == "user"] == ["?=", hint]
    assert (episode.end, episode.turn_rewards, episode.reward) == ("done", [0.0, 0.0, 1.0], 1.0)


def test_what_the_environment_cut_has_not_ended() -> None:
    talk = Talk(texts(CustomEnvironment(Endless)), asked("?"), [1])
    talk.say(0, "stop")
    (answer,) = talk.conversations.answers(wait=True)
    assert (answer.token_ids, answer.ended) == (None, False)
    assert talk.over()[0].end == "cut"


class Shop:
    """Tools of an object, a reward of its own, and an opening."""

    open_now = 0

    def __init__(self) -> None:
        type(self).open_now += 1

    def reset(self, *, seed: int, item: str, **row: Any) -> str:
        self.item, self.bought, self.seed = item, [], seed
        return f" Buy {item} ({row['prompt']})."

    def buy(self, name: str) -> str:
        """Buy something.

        Args:
            name: Of the thing.
        """
        self.bought.append(name)
        return f"bought {name}"

    def get_reward(self) -> float:
        return float(self.item in self.bought)

    def close(self) -> None:
        type(self).open_now -= 1


def test_an_object_with_tools_opens_the_prompt_and_rewards_the_episode() -> None:
    factory = CustomEnvironment(Shop, **WRITTEN)
    assert Shop.open_now == 0, "the one that was looked at is closed"
    talk = Talk(texts(factory), asked("go", item=["tea"]), [1, 1])
    assert bytes_tokenizer().decode(talk.prompt_ids[0]) == "go Buy tea (go)." and Shop.open_now == 2
    assert talk.heard(0, 'buy("tea")') == "bought tea" and talk.heard(1, 'buy("milk")') == "bought milk"
    assert talk.heard(0, "done") is None and talk.heard(1, "done") is None
    first, second = talk.over()
    assert (first.reward, second.reward, Shop.open_now) == (1.0, 0.0, 0)
    assert first.prompt == second.prompt == "go Buy tea (go)."


def test_an_opening_goes_on_the_end_of_the_last_message_of_a_chat() -> None:
    talk = Talk(chats(CustomEnvironment(Shop)), asked(USER, item=["tea"]), [1])
    talk.say(0, "no")
    talk.conversations.answers(wait=True)
    (episode,) = talk.over()
    assert episode.prompt[0]["content"].startswith("What is 17 times 25? Buy tea")  # type: ignore[index]
    assert USER == [{"role": "user", "content": "What is 17 times 25?"}], "the data's own row was changed"


class Two:
    def reset(self, seed: int) -> str:
        return f"{seed % 2}"

    def step(self, action: str) -> tuple[Any, ...]:
        return "", 0.0, True, False, {}


def test_a_group_whose_environments_begin_differently_is_refused() -> None:
    interaction = texts(CustomEnvironment(Two, seed="sample"))
    with pytest.raises(GenerationError, match=r"one prompt began with '0' and with '1'.*env.seed=group"):
        interaction.begin(asked("?"), [2, 3], max_new_tokens=4)
    Talk(interaction, asked("?"), [2, 4]).conversations.close()


def test_rows_choose_their_environment_by_a_column() -> None:
    factory = CustomEnvironment({"game": GuessNumber, "shop": Endless})
    talk = Talk(texts(factory), asked("?", "?", environment=["shop", "game"]), [1, 1])
    assert talk.heard(0, "a") == "more" and talk.heard(1, "a") == "?="
    talk.conversations.close()
    with pytest.raises(ConfigError, match=r"environment is 'gane'.*Did you mean 'game'"):
        texts(factory).begin(asked("?", environment=["gane"]), [1], max_new_tokens=4)


# ------------------------------------------------------------------ what fails


class Breaks:
    """Fails at the place that the row names."""

    def __init__(self) -> None:
        self.at = ""

    def reset(self, at: str) -> None:
        self.at = at
        self._fail("reset")

    def step(self, action: str) -> tuple[Any, ...]:
        self._fail("step")
        return "go on", {"nan": float("nan"), "text": "x"}.get(self.at, 1.0), action == "end", False, {}

    def get_reward(self) -> float:
        self._fail("get_reward")
        return 2.0

    def close(self) -> None:
        self._fail("close")

    def _fail(self, here: str) -> None:
        if self.at == here:
            raise RuntimeError(f"broken in {here}")


@pytest.mark.parametrize("at", ["reset", "step", "get_reward"])
def test_an_environment_that_raises_fails_its_episode_and_no_other(at: str, caplog: pytest.LogCaptureFixture) -> None:
    interaction = texts(CustomEnvironment(Breaks))
    with caplog.at_level(logging.WARNING):
        talk = Talk(interaction, asked("?", "?", at=[at, "close"]), [1, 2])
        for row in (0, 1):
            talk.say(row, "end")
        assert sorted(answer.row for answer in talk.conversations.answers(wait=True)) == [0, 1]
        failed, sound = talk.over()
    assert failed.failed and failed.end == "failed" and failed.error == f"RuntimeError: broken in {at}"
    assert not sound.failed and sound.reward == 2.0
    assert sum("is logged once" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(("at", "words"), [("nan", "not finite"), ("text", "which is no number")])
def test_a_reward_that_is_no_number_ends_the_run(at: str, words: str) -> None:
    with pytest.raises(RewardError, match=rf"Breaks\.step.*{words}"):
        one(texts(CustomEnvironment(Breaks)), "a", at=at)


class Half:
    def reset(self) -> None: ...

    def step(self, action: str) -> tuple[Any, ...]:
        return "x", 0.0


def test_a_step_that_returns_no_five_values_ends_the_run() -> None:
    with pytest.raises(ConfigError, match=r"Half\.step returned .*five values: observation, reward"):
        one(texts(CustomEnvironment(Half)), "a")


def test_too_many_failures_end_the_run_with_the_commonest_error() -> None:
    interaction = texts(CustomEnvironment(Breaks, max_failed=0.5))
    ends = ["failed", "failed", "done", "done", "done"]
    some = [Episode("?", [], end, 1, error="late" if end == "failed" else None) for end in ends]  # type: ignore[arg-type]
    interaction.check_failures(some)
    with pytest.raises(GenerationError, match=r"2 of 3 episodes failed.*max_failed=0.5.*2 times: late"):
        interaction.check_failures(some[:3])
    assert GenerationError.exit_code == 5


# ------------------------------------------------------------------ what takes long


class Hangs:
    """Sleeps where it is told to, as long as a test runs."""

    def reset(self) -> None: ...

    def step(self, action: str) -> tuple[Any, ...]:
        if action == "hang":
            time.sleep(20)
        return f"heard {action}", 1.0, action == "end", False, {}


class HangsAwaiting(Hangs):
    async def step(self, action: str) -> tuple[Any, ...]:  # type: ignore[override]
        await asyncio.sleep(20 if action == "hang" else 0.0)
        return f"heard {action}", 1.0, action == "end", False, {}


class HangsAsync(Hangs):
    """Says that it awaits, and blocks."""

    async def step(self, action: str) -> tuple[Any, ...]:  # type: ignore[override]
        return super().step(action)


@pytest.mark.parametrize("kind", [Hangs, HangsAwaiting, HangsAsync])
def test_what_hangs_is_given_up_and_the_others_go_on(kind: type) -> None:
    talk = Talk(texts(CustomEnvironment(kind, step_timeout=0.2)), asked("?", "?", "?"), [1, 2, 3])
    begun = time.perf_counter()
    for row, text in enumerate(["go", "hang", "on"]):
        talk.say(row, text)
    heard: dict[int, str | None] = {}
    while len(heard) < 3:
        heard |= {answer.row: talk.read(answer) for answer in talk.conversations.answers(wait=True)}
    assert heard[1] is None
    if kind is not HangsAsync:  # what is in its thread with it is blocked with it
        assert (heard[0], heard[2]) == ("heard go", "heard on")
        assert talk.heard(0, "end") is None and talk.heard(2, "end") is None
    first, late, last = talk.over()
    assert time.perf_counter() - begun < 15
    assert late.end == "timeout" and late.failed and "env.step_timeout=0.2" in str(late.error)
    assert first.end == last.end == ("timeout" if kind is HangsAsync else "done")
    assert Talk(texts(CustomEnvironment(kind)), asked("?"), [1]).heard(0, "go") == "heard go"


def test_an_episode_that_takes_too_long_is_over() -> None:
    talk = Talk(texts(CustomEnvironment(Endless, episode_timeout=0.2)), asked("?"), [1])
    assert talk.heard(0, "a") == "more"
    time.sleep(0.3)
    assert talk.heard(0, "a") is None
    (episode,) = talk.over()
    assert episode.end == "timeout" and "0.2 s" in str(episode.error)


class Slow(Hangs):
    async def step(self, action: str) -> tuple[Any, ...]:  # type: ignore[override]
        await asyncio.sleep(float(action))
        return action, 0.0, False, False, {}


def test_awaited_answers_come_as_they_are_ready_and_at_the_same_time() -> None:
    talk = Talk(texts(CustomEnvironment(Slow)), asked(*"????"), [1, 2, 3, 4])
    begun = time.perf_counter()
    for row, seconds in enumerate(["0.6", "0.1", "0.6", "0.3"]):
        talk.say(row, seconds)
    order: list[int] = []
    while len(order) < 4:
        order += [answer.row for answer in talk.conversations.answers(wait=True)]
    assert order[:2] == [1, 3] and time.perf_counter() - begun < 1.4, "one after another takes 1.6"
    talk.conversations.close()


# ------------------------------------------------------------------ seeds


class Draws:
    """Draws from every generator at hand, in reset and in each turn."""

    def reset(self, seed: int) -> None:
        self.seed = seed
        self.drawn = [random.random(), float(np.random.rand())]

    def step(self, action: str) -> tuple[Any, ...]:
        self.drawn += [random.random(), float(np.random.rand())]
        return f"{self.seed} {self.drawn}", 0.0, False, False, {}


def drawn(order: list[int], seeds: list[int]) -> dict[int, list[str | None]]:
    talk = Talk(texts(CustomEnvironment(Draws)), asked(*("?" for _ in seeds)), seeds, turn=8)
    heard: dict[int, list[str | None]] = {row: [] for row in range(len(seeds))}
    for _ in range(2):
        for row in order:
            heard[row].append(talk.heard(row, "a"))
    talk.conversations.close()
    return heard


def test_what_an_environment_draws_depends_on_its_seed_alone_and_leaves_no_trace() -> None:
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    here = drawn([0, 1, 2], [5, 6, 5])
    after = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert before == after
    random.seed(4)
    assert drawn([2, 0, 1], [5, 6, 5]) == here
    assert here[0] == here[2] != here[1] and here[0][0] != here[0][1]


@given(st.integers(-(2**63), 2**63 - 1))
def test_any_key_makes_a_seed(key: int) -> None:
    talk = Talk(texts(CustomEnvironment(Draws)), asked("?"), [key])
    heard = talk.heard(0, "a")
    talk.conversations.close()
    assert heard is not None and 0 <= int(heard.split()[0]) < 2**31
