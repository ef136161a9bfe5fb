"""`env=rollout_func`: what a function of the user's returns becomes completions, and what it asks is drawn as usual."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from generation_cases import EOS, PAD, build, responses, spell, unspell
from torch import nn

from lit_rl.core.errors import ConfigError, GenerationError, LitRLError, NumericError
from lit_rl.core.rollout import Completions, PromptBatch, Prompts, Sampling
from lit_rl.generation import RolloutFunction
from lit_rl.generation.collect import RolloutRequest, Vocabulary, as_reward_input
from lit_rl.generation.native import NativeGenerator
from lit_rl.generation.rollout_function import RolloutCalls

PROMPTS = [spell([3, 4]), spell([11, 6, 7])]
SAMPLED = Sampling(max_new_tokens=6)
LONGEST = 12
"""Tokens of the longest prompt of the data."""


class Tokenizer:
    """A letter a token, as the other tests of generators spell."""

    chat_template = None
    all_special_tokens: tuple[str, ...] = ()
    bos_token = eos_token = bos_token_id = eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(unspell(text))}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return spell(ids)


@pytest.fixture(scope="module")
def policy() -> nn.Module:
    return build("qwen2").eval()


def batch(**columns: list[Any]) -> PromptBatch:
    return PromptBatch(PROMPTS, [list(unspell(text)) for text in PROMPTS], columns, [0, 1], [0, 0])


def draw(
    policy: nn.Module, function: Callable[..., Any] | None, group_size: int = 3, seed: int = 0, **settings: Any
) -> Completions:
    columns, sampling = settings.pop("data", {}), settings.pop("sampling", SAMPLED)
    generator = settings.pop("generator", None) or NativeGenerator()
    source = None
    if function is not None:
        source = RolloutCalls(RolloutFunction(function, **settings), Tokenizer(), {}, LONGEST)
    return RolloutRequest(
        batch(**columns),
        policy,
        sampling=sampling,
        group_size=group_size,
        vocabulary=Vocabulary((EOS, 5, 9), PAD, spell, unspell),
        version=7,
        seed=seed,
        interaction=source,
    ).send_to(generator)()


def single(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    return trainer.generate([trainer.encode(prompt) for prompt in prompts])


@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(max_new_tokens=6, stop=("f5", "1n", "a"))], ids=["", "stop"])
def test_one_that_only_generates_is_as_none(policy: nn.Module, sampling: Sampling) -> None:
    """The same samples, log-probs and ends, to the bit."""
    ours, usual = (draw(policy, function, sampling=sampling, group_size=6) for function in (single, None))
    assert {*usual.ended.tolist()} == {True, False} or sampling is not SAMPLED
    assert ours.version == 7 and ours.attended is None and ours.turn is None and ours.episodes is not None
    for name in ("prompt_ids", "prompt_mask", "response_ids", "response_mask", "sampler_logprobs", "ended", "group_id"):
        assert torch.equal(getattr(ours, name), getattr(usual, name)), name
    assert [each.messages[0]["content"] for each in ours.episodes] == [spell(ids) for ids in responses(usual)]
    assert [each.end == "answered" for each in ours.episodes] == usual.ended.tolist()


def turns(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """Two turns, the second of those rows only that did not end; between them something is said to the policy."""
    first = trainer.generate([trainer.encode(prompt) for prompt in prompts])
    rows = [row for row, ended in enumerate(first["ended"]) if not ended]
    texts = [first["prompt_ids"][row] + first["completion_ids"][row] + [7, 8] for row in rows]
    second = trainer.generate(texts, rows=rows, max_new_tokens=2)
    masks = [[1] * len(ids) for ids in first["completion_ids"]]
    for row, ids, logprobs in zip(rows, second["completion_ids"], second["logprobs"]):
        first["completion_ids"][row] += [7, 8, *ids]
        first["logprobs"][row] += [0.0, 0.0, *logprobs]
        masks[row] += [0, 0, *[1] * len(ids)]
    return {name: first[name] for name in ("prompt_ids", "completion_ids", "logprobs")} | {"env_mask": masks}


def test_what_the_policy_did_not_write_is_read_and_not_learned_from(policy: nn.Module) -> None:
    out = draw(policy, turns, group_size=6)
    assert out.attended is not None and out.turn is not None and out.episodes is not None
    heard = out.attended & ~out.response_mask
    assert heard.any() and (out.response_ids[heard].view(-1, 2) == torch.tensor([7, 8])).all()
    assert (out.sampler_logprobs[heard] == 0).all() and (out.turn[heard] == 0).all()
    assert [each.turns for each in out.episodes] == (out.turn.amax(1) + 1).tolist()
    assert [each.observed_tokens for each in out.episodes] == heard.sum(1).tolist()
    assert {each.turns for each in out.episodes} == {1, 2}
    later = out.turn == 1
    assert ((out.response_mask & later).sum(1) <= 2).all(), "cut by max_new_tokens"


def test_each_turn_and_each_answer_is_a_message(policy: nn.Module) -> None:
    """Of the tokens of their authors, one after another."""
    out = draw(policy, turns, group_size=6)
    assert out.attended is not None and out.turn is not None and out.episodes is not None
    for row, episode in enumerate(out.episodes):
        said = [message["content"] for message in episode.messages]
        assert [message["role"] for message in episode.messages] == ["assistant", "user", "assistant"][: len(said)]
        assert "".join(said) == spell(out.response_ids[row][out.attended[row]].tolist())
        own = [out.response_ids[row][out.response_mask[row] & (out.turn[row] == turn)] for turn in (0, 1)]
        assert said[::2] == [spell(ids.tolist()) for ids in own][: episode.turns] and len(said[::2]) == episode.turns


def test_messages_are_those_that_the_function_gives(policy: nn.Module) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "thank you"},
    ]

    def function(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        out = single(prompts, trainer)
        shape = {"completion_ids": [[3, 7, 4]] * 6, "logprobs": [[-1.0, 0.0, -1.0]] * 6, "env_mask": [[1, 0, 1]] * 6}
        return {"prompt_ids": out["prompt_ids"], **shape, "episode_messages": [said] * 5 + [None]}

    out = draw(policy, function)
    assert out.episodes is not None
    read = {**call, "function": {"name": "add", "arguments": {"a": 1}}}
    first, *others = out.episodes[0].messages
    assert first == {"role": "assistant", "content": "", "tool_calls": [read]} and others == said[1:]
    assert "add(a=1)" in out.episodes[0].transcript() and out.episodes[0].extra == {}
    assert [message["content"] for message in out.episodes[5].messages] == [spell([n]) for n in (3, 7, 4)]


def test_what_the_function_marks_as_failed_says_why(policy: nn.Module) -> None:
    """It is an episode that failed, or was too late; its tokens stay, and the others are as they would be."""
    errors = [None, "no server", KeyError("url"), TimeoutError("after 3 s"), None, "x" * 999]

    def function(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        return single(prompts, trainer) | {"episode_error": errors}

    out, usual = draw(policy, function), draw(policy, single)
    assert out.episodes is not None and usual.episodes is not None
    assert torch.equal(out.response_ids, usual.response_ids) and torch.equal(out.ended, usual.ended)
    sound = [each.end for each in usual.episodes]
    ends = [each.end for each in out.episodes]
    assert ends == [sound[0], "failed", "failed", "timeout", sound[4], "failed"]
    assert [each.failed for each in out.episodes] == [error is not None for error in errors]
    told = [each.error for each in out.episodes]
    assert told[:5] == [None, "no server", "KeyError: 'url'", "TimeoutError: after 3 s", None]
    assert len(str(told[5])) < 210
    assert out.episodes[1].extra == {} and out.episodes[1].messages == usual.episodes[1].messages


def test_samples_depend_on_the_completion_and_its_turn_alone(policy: nn.Module) -> None:
    """Asked for one after another, and backwards, the second turns are those that were asked for together."""

    def one_by_one(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        class Alone:
            encode = trainer.encode

            @staticmethod
            def generate(texts: Any, rows: Any = None, max_new_tokens: int | None = None) -> Any:
                if rows is None:
                    return trainer.generate(texts)
                parts = {
                    row: trainer.generate([text], rows=[row], max_new_tokens=max_new_tokens)
                    for row, text in reversed(list(zip(rows, texts)))
                }
                return {name: [parts[row][name][0] for row in rows] for name in ("completion_ids", "logprobs")}

        return turns(prompts, Alone)

    together, alone = draw(policy, turns, group_size=6), draw(policy, one_by_one, group_size=6)
    assert torch.equal(together.response_ids, alone.response_ids)
    torch.testing.assert_close(together.sampler_logprobs, alone.sampler_logprobs, atol=1e-4, rtol=0)
    assert not torch.equal(together.response_ids, draw(policy, turns, group_size=6, seed=1).response_ids)


class Counting(NativeGenerator):
    """Keeps how long the responses of each call may be."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        self.asked.append(sampling.max_new_tokens)
        return super().generate(prompts, sampling)


class OfUnknownContext(Counting):
    context = 0  # type: ignore[assignment]


def second_turns(
    policy: nn.Module, rooms: Sequence[int], *, alone: bool = False, texts: Sequence[list[int]] = (), **settings: Any
) -> tuple[dict[str, list[Any]], list[int]]:
    """Turns that may be so long, asked for together or each by itself; and how long each call of the generator was."""
    out: dict[str, list[Any]] = {}

    def function(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        first = single(prompts, trainer)
        behind = texts or [a + b for a, b in zip(first["prompt_ids"], first["completion_ids"])]
        parts = [
            trainer.generate([behind[row] for row in rows], rows=rows, max_new_tokens=[rooms[row] for row in rows])
            for rows in ([[row] for row in range(len(rooms))] if alone else [list(range(len(rooms)))])
        ]
        out.update({name: [each for part in parts for each in part[name]] for name in parts[0]})
        return first

    generator = settings.pop("generator", Counting)()
    draw(policy, function, group_size=len(rooms) // len(PROMPTS), generator=generator, **settings)
    return out, generator.asked[1:]


def alike(ours: dict[str, list[Any]], theirs: dict[str, list[Any]]) -> None:
    assert ours["completion_ids"] == theirs["completion_ids"] and ours["ended"] == theirs["ended"]
    for mine, other in zip(ours["logprobs"], theirs["logprobs"]):
        assert mine == pytest.approx(other, abs=1e-4)


ROOMS = [6, 1, 3, 2, 5, 4, 1, 6, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("sampling", "calls"),
    [
        (SAMPLED, [6]),
        (Sampling(max_new_tokens=6, stop=("f5", "1n", "a")), [6]),
        (Sampling(max_new_tokens=6, min_new_tokens=3), [6, 2, 1]),
    ],
    ids=["", "stop", "min_new_tokens"],
)
def test_what_may_be_shorter_is_drawn_with_the_others_and_is_as_it_would_be_alone(
    policy: nn.Module, sampling: Sampling, calls: list[int]
) -> None:
    """Tokens, log-probs and ends. Before `min_new_tokens` no EOS is drawn: who has less room is drawn apart."""
    together, asked = second_turns(policy, ROOMS, sampling=sampling)
    alone, each = second_turns(policy, ROOMS, alone=True, sampling=sampling)
    alike(together, alone)
    assert asked == calls and each == ROOMS
    assert all(len(ids) <= room for ids, room in zip(together["completion_ids"], ROOMS))
    drawn = zip(together["completion_ids"], ROOMS, alone["ended"])
    cut = [len(ids) == room and not ended for ids, room, ended in drawn]
    assert any(cut) and (any(alone["ended"]) or sampling.min_new_tokens)


def test_no_text_is_drawn_beyond_the_context_of_the_model() -> None:
    """GPT-2 has a table of 64 positions, and looking beyond it is an error."""
    policy, rooms = build("gpt2").eval(), [6, 1, 3, 2]
    texts = [[2 + (7 * row + j) % 30 for j in range(64 - room)] for row, room in enumerate(rooms)]
    together, asked = second_turns(policy, rooms, texts=texts)
    assert asked == [6, 3, 2, 1]
    alike(together, second_turns(policy, rooms, texts=texts, alone=True)[0])
    shorter = [ids[:40] for ids in texts]
    assert second_turns(policy, rooms, texts=shorter)[1] == [6]
    assert second_turns(policy, rooms, texts=shorter, generator=OfUnknownContext)[1] == [6, 3, 2, 1]


def test_first_turns_are_those_that_were_asked_for_together(policy: nn.Module) -> None:
    def in_chunks(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        texts = [trainer.encode(prompt) for prompt in prompts]
        parts = [trainer.generate(texts[i : i + 5], rows=range(i, min(i + 5, len(texts)))) for i in (0, 5, 10)]
        return {name: [each for part in parts for each in part[name]] for name in parts[0]}

    chunks, together = draw(policy, in_chunks, group_size=6), draw(policy, single, group_size=6)
    assert torch.equal(chunks.response_ids, together.response_ids)
    torch.testing.assert_close(chunks.sampler_logprobs, together.sampler_logprobs, atol=1e-4, rtol=0)


def test_nobody_has_to_go_on(policy: nn.Module) -> None:
    def nobody(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        none = trainer.generate([], rows=[])
        assert none == {"prompt_ids": [], "completion_ids": [], "logprobs": [], "ended": []}
        return single(prompts, trainer)

    assert torch.equal(draw(policy, nobody).response_ids, draw(policy, single).response_ids)


def test_a_turn_is_drawn_with_noise_of_its_own(policy: nn.Module) -> None:
    """The same text again is another sample, and those of a group differ."""

    def again(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        texts = [trainer.encode(prompt) for prompt in prompts]
        first, second = trainer.generate(texts), trainer.generate(texts)
        assert first["completion_ids"] != second["completion_ids"]
        assert len({tuple(ids) for ids in second["completion_ids"][:8]}) > 4
        return second

    draw(policy, again, group_size=8)


def test_what_else_it_returns_goes_to_rewards(policy: nn.Module) -> None:
    def scored(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        assert trainer.columns == {"answer": ["x"] * 3 + ["y"] * 3} and trainer.num_generations == 3
        assert list(prompts) == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
        return single(prompts, trainer) | {"env_reward": torch.arange(6.0), "moves": tuple("abcdef"), "game": "chess"}

    data = {"answer": ["x", "y"]}
    out = draw(policy, scored, columns=["env_reward"], data=data)
    _, _, columns = as_reward_input(batch(**data), [""] * 6, out.episodes)
    assert columns["env_reward"] == [0, 1, 2, 3, 4, 5] and columns["game"] == ["chess"] * 6
    assert columns["moves"] == list("abcdef") and "ended" not in columns
    assert columns["answer"] == ["x"] * 3 + ["y"] * 3


def test_a_function_may_declare_its_columns_itself() -> None:
    def scored(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        return single(prompts, trainer)

    scored.columns = ("score",)  # pyright: ignore[reportFunctionMemberAccess]
    assert RolloutFunction(scored).columns == ("episodes", "score")
    assert RolloutFunction(scored, columns=["moves", "score"]).columns == ("episodes", "score", "moves")


def test_tokens_behind_the_last_of_the_policy_are_read_by_nobody(policy: nn.Module) -> None:
    def more(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        ids = [[3, 4, EOS, 7, 8]] * len(prompts)
        mask = [[0, 1, 1, 0, 0]] * len(prompts)
        return {"prompt_ids": [[1]] * 6, "completion_ids": ids, "logprobs": [[[-1.0]] * 5] * 6, "env_mask": mask}

    out = draw(policy, more)
    assert out.attended is not None and out.turn is not None
    assert out.response_ids.tolist() == [[3, 4, EOS]] * 6 and out.attended.all() and out.ended.all()
    assert out.response_mask.tolist() == [[False, True, True]] * 6 and (out.turn == 0).all()
    assert out.sampler_logprobs.tolist() == [[0, -1, -1]] * 6


GOOD = {"prompt_ids": [[1]] * 6, "completion_ids": [[2, 3]] * 6, "logprobs": [[-1.0, -2.0]] * 6}
ANSWER = {"role": "assistant", "content": "a"}
WRONG: dict[str, tuple[Any, type[LitRLError], str]] = {
    "nothing": (None, GenerationError, "returned NoneType, expected a dict with prompt_ids,"),
    "a key": ({"prompt_ids": [], "logprobs": []}, GenerationError, "a dict without completion_ids"),
    "too few": (GOOD | {"logprobs": [[-1.0, -2.0]]}, GenerationError, "1 entries as logprobs, expected a list of 6"),
    "no ids": (GOOD | {"completion_ids": [[2, 3]] * 5 + [[]]}, GenerationError, r"completion 5 \[\] as completion_ids"),
    "text": (GOOD | {"completion_ids": ["ab"] * 6}, GenerationError, "completion 0 'ab' as completion_ids"),
    "log-probs": (GOOD | {"logprobs": [[-1.0]] * 6}, GenerationError, "completion 0 1 logprobs for 2 tokens"),
    "none": (GOOD | {"logprobs": [None] * 6}, GenerationError, "completion 0 None logprobs for 2 tokens"),
    "nan": (GOOD | {"logprobs": [[-1.0, float("nan")]] * 6}, NumericError, "completion 0 the log-prob nan"),
    "no number": (GOOD | {"logprobs": [["a", "b"]] * 6}, GenerationError, "the log-prob 'a', which is no number"),
    "mask": (GOOD | {"env_mask": [[1, 2]] * 6}, GenerationError, "completion 0 2 in env_mask, expected 1 or 0"),
    "ended": (GOOD | {"ended": [1, 0, None, 1, 1, "end"]}, GenerationError,
              "completion 5 'end' in ended, expected 1 or 0"),
    "messages": (GOOD | {"episode_messages": [["hi"]] * 6}, GenerationError,
                 "completion 0 episode_messages, which takes messages, each a dict with one of the roles assistant,"),
    "turns": (GOOD | {"episode_messages": [[ANSWER, ANSWER]] * 6}, GenerationError,
              "for each of the 1 turns that env_mask has; here 2"),
    "a message": (GOOD | {"episode_messages": [[ANSWER | {"content": 3}]] * 6}, GenerationError,
                  "a text under 'content'"),
    "a call": (GOOD | {"episode_messages": [[ANSWER | {"tool_calls": ["add"]}]] * 6}, GenerationError,
               "takes calls such as"),
    "no JSON": (GOOD | {"episode_messages": [[ANSWER | {"at": object()}]] * 6}, GenerationError, "what JSON can write"),
    "no reason": (GOOD | {"episode_error": [None, False] * 3}, GenerationError,
                  "completion 1 False as episode_error, expected a text or an exception that says what went wrong"),
    "no words": (GOOD | {"episode_error": [""] * 6}, GenerationError, "completion 0 '' as episode_error"),
    "places": (GOOD | {"env_follows": [[-1, 1]] * 6}, GenerationError,
               "completion 0 1 in env_follows for token 1, expected the number of an earlier token, -1 to -1 for"),
    "no places": (GOOD | {"env_follows": [[-1]] * 6}, GenerationError, "completion 0 1 env_follows for 2 tokens"),
    "branches": (GOOD | {"env_follows": [[-1, -1]] * 6}, GenerationError,
                 "completion 0 2 branches by env_follows, and env.max_branches=1"),
    "nothing before": (GOOD | {"env_follows": [[-2, 0]] * 6}, GenerationError, "with nothing before it, by"),
    "no limit": (GOOD | {"episode_limit": ["tired"] * 6}, GenerationError, "completion 0 'tired' as episode_limit"),
    "no policy": (GOOD | {"env_mask": [[0, 0]] * 6}, GenerationError, "an env_mask without a token of the policy"),
    "prompts": (GOOD | {"prompt_ids": [[1], [1], [2]] * 2}, GenerationError, "completion 2 other prompt_ids than"),
    "long": (GOOD | {"completion_ids": [[2] * 9] * 6, "logprobs": [[-1.0] * 9] * 6}, GenerationError,
             "completion 0 9 tokens, and env.max_tokens=8"),
    "long prompt": (GOOD | {"prompt_ids": [[1] * 5] * 6}, GenerationError, "prompt of 5 tokens.*env.max_prompt_tokens"),
    "no list": (GOOD | {"logprobs": [5] * 6}, GenerationError, "completion 0 5 logprobs for 2 tokens"),
    "half a list": (GOOD | {"game": ["a"]}, GenerationError, "1 entries as game, expected a list of 6"),
    "ours": (GOOD | {"completions": ["a"] * 6}, GenerationError, "returned completions, which rewards get already"),
    "undeclared": (GOOD, GenerationError, "did not return score, which env.columns names"),
    "taken": (GOOD | {"score": 1, "answer": 1}, GenerationError, "returned answer, which rewards get already"),
}  # fmt: skip


def test_what_cannot_be_learned_from_is_refused_by_name(policy: nn.Module) -> None:
    settings = {"columns": ["score"], "max_tokens": 8, "max_prompt_tokens": 4, "data": {"answer": ["x", "y"]}}
    for name, (returned, kind, match) in WRONG.items():
        given = returned if name == "undeclared" or returned is None else {"score": 0.0, **returned}
        with pytest.raises(kind, match=f"env.path=<lambda> .*{match}"):
            draw(policy, lambda prompts, trainer, given=given: given, **settings)


def test_a_prompt_longer_than_the_run_is_planned_for_has_to_be_declared(policy: nn.Module) -> None:
    def longer(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        return trainer.generate([[3] * (LONGEST + 1)] * 6)

    with pytest.raises(GenerationError, match="prompt of 13 tokens, and the run is planned for 12"):
        draw(policy, longer)
    assert draw(policy, longer, max_prompt_tokens=13).prompt_ids.shape == (6, 13)


def test_errors_of_the_function_say_whose_they_are(policy: nn.Module) -> None:
    def fails(prompts: Sequence[str], trainer: Any) -> Any:
        raise KeyError("url")

    with pytest.raises(GenerationError, match=r"env.path=fails raised KeyError: 'url'"):
        draw(policy, fails)


def test_a_call_that_takes_too_long_is_interrupted(policy: nn.Module) -> None:
    """Also one that goes on after any exception; one that is in time hears nothing of it, and neither do others."""

    def hangs(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        while True:
            try:
                time.sleep(20)
            except Exception:
                continue

    before, begun = signal.getsignal(signal.SIGALRM), time.perf_counter()
    with pytest.raises(GenerationError, match=r"hangs took longer than env.rollout_timeout=0.3 s"):
        draw(policy, hangs, rollout_timeout=0.3)
    assert time.perf_counter() - begun < 15
    drawn = draw(policy, single, rollout_timeout=30.0)
    assert responses(drawn) == responses(draw(policy, single))
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_limit_that_cannot_be_kept_is_refused(policy: nn.Module) -> None:
    """A thread beside the main one hears no alarm."""
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match=r"env.rollout_timeout=30.*main thread"):
        pool.submit(draw, policy, single, rollout_timeout=30.0).result()
    assert responses(draw(policy, single, rollout_timeout=None)) == responses(draw(policy, None))


def test_seconds_of_the_function_are_those_beside_generation(policy: nn.Module) -> None:
    def slow(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        time.sleep(0.3)
        return single(prompts, trainer)

    def slow_generator(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        trainer._generate = partial(_after_a_while, trainer._generate)
        return single(prompts, trainer)

    of_function, of_generation = draw(policy, slow), draw(policy, slow_generator)
    assert of_function.episodes is not None and of_generation.episodes is not None
    assert sum(each.seconds for each in of_function.episodes) >= 0.3
    assert sum(each.seconds for each in of_generation.episodes) < 0.3


def _after_a_while(generate: Callable[..., Completions], *asked: Any) -> Completions:
    time.sleep(0.5)
    return generate(*asked)


def test_the_handle_is_used_as_it_has_to_be(policy: nn.Module) -> None:
    def elsewhere(prompts: Sequence[str], trainer: Any) -> Any:
        raised: list[Exception] = []

        def work() -> None:
            try:
                trainer.generate([[1]] * 6)
            except GenerationError as error:
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        raise raised[0]

    with pytest.raises(GenerationError, match="another thread"):
        draw(policy, elsewhere)
    for texts, rows in (([[1]], None), ([[1]] * 2, [0, 0]), ([[1]], [6])):
        with pytest.raises(GenerationError, match=r"There are 6, each at most once"):
            draw(policy, lambda prompts, trainer, texts=texts, rows=rows: trainer.generate(texts, rows=rows))


def written_for_trl(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """What examples for TRL read of their trainer."""
    tokenizer, args = trainer.processing_class, trainer.args
    assert (args.temperature, args.top_p, args.top_k, args.min_p) == (1.0, 1.0, 0, 0.0)
    assert (trainer.temperature, trainer.repetition_penalty, trainer.max_completion_length) == (1.0, 1.0, 6)
    assert args.max_completion_length == 6 and args.num_generations == trainer.num_generations == 3
    assert trainer.state.global_step == 7 and trainer.chat_template_kwargs == args.chat_template_kwargs == {}
    place = trainer.accelerator
    assert (place.process_index, place.num_processes, place.is_main_process) == (0, 1, True)
    assert torch.zeros(1, device=place.device).device.type == "cpu"
    asked = tokenizer(prompts[0])["input_ids"]
    texts = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    assert texts[0] == asked
    trainer.vllm_generation.sync_weights()
    prompt_ids, completion_ids, logprobs, token_ids = trainer.vllm_generation.generate(
        prompts=texts, images=None, num_generations=trainer.num_generations
    )
    assert [[each for (each,) in row] for row in token_ids] == completion_ids
    logprobs = [[each[0] for each in row] for row in logprobs]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


def test_a_function_that_was_written_for_trl_draws_what_a_run_without_it_draws(policy: nn.Module) -> None:
    ours, usual = draw(policy, written_for_trl), draw(policy, None)
    for name in ("prompt_ids", "response_ids", "sampler_logprobs", "ended"):
        assert torch.equal(getattr(ours, name), getattr(usual, name)), name


@pytest.mark.parametrize(
    ("asks", "words"),
    [
        (lambda trainer: trainer.args.learning_rate, "trainer.args .* no 'learning_rate'. It has .*temperature, top_k"),
        (lambda trainer: trainer.accelerator.gather, "trainer.accelerator .* no 'gather'. It has device, is_main"),
        (lambda trainer: trainer.vllm_generation.llm, "trainer.vllm_generation .* no 'llm'. It has generate, sync_w"),
        (lambda trainer: trainer.vllm_generation.generate([[3]], images=[[1]]), "got images"),
    ],
)
def test_what_a_part_of_the_trainer_of_trl_has_not_is_said(policy: nn.Module, asks: Any, words: str) -> None:
    with pytest.raises(GenerationError, match=words):
        draw(policy, lambda prompts, trainer: asks(trainer))


def test_a_name_of_the_trainer_of_trl_is_answered_with_what_there_is(policy: nn.Module) -> None:
    def reaches(prompts: Sequence[str], trainer: Any) -> Any:
        assert getattr(trainer, "model", None) is None and trainer.processing_class is trainer.tokenizer
        return trainer.optimizer.param_groups

    there = r"no 'optimizer': it is not TRL's GRPOTrainer. It has .*columns, .*generate, .*tokenizer.*trainer\.generate"
    with pytest.raises(Exception, match=there):
        draw(policy, reaches)


async def later(prompts: Any, trainer: Any) -> Any: ...


def test_a_function_that_is_async_is_refused() -> None:
    with pytest.raises(ConfigError, match="env.path=later is async"):
        RolloutFunction(later)


def test_what_a_function_draws_is_seeded_by_its_completions_and_moves_no_training(policy: nn.Module) -> None:
    drawn: list[list[float]] = []

    def draws(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        drawn.append([random.random(), float(torch.rand(()))])
        made = single(prompts, trainer)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        return made

    torch.manual_seed(5)
    before = torch.get_rng_state()
    for seed in (0, 0, 1):
        random.random()
        draw(policy, draws, seed=seed)
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32


def test_a_function_that_exits_ends_no_run_with_status_0(policy: nn.Module) -> None:
    def exits(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        raise SystemExit(0)

    with pytest.raises(GenerationError, match="raised SystemExit"):
        draw(policy, exits)
