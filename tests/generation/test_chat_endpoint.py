"""Agents that know OpenAI's API alone write completions of the shipped policy, with the tokens that it drew."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lit_rl.core.errors import ConfigError, DataError, GenerationError, LitRLError
from lit_rl.core.rollout import Completions, PromptBatch, Sampling, select, trim
from lit_rl.environments.frames import ChatFrames
from lit_rl.generation import ChatEndpoint, RolloutFunction, chat_endpoint
from lit_rl.generation.chat_conversation import read_request
from lit_rl.generation.chat_endpoint import Agent, Played
from lit_rl.generation.collect import RolloutRequest, Vocabulary, as_reward_input
from lit_rl.generation.native import NativeGenerator
from lit_rl.generation.rollout_function import RolloutCalls
from lit_rl.models import LanguageModel
from lit_rl.models.forward import score

MODEL = LanguageModel("tiny")
TEXTS = ["17+25=", "3+4="]
ASKED = [[{"role": "user", "content": text}] for text in TEXTS]
AGAIN = {"role": "user", "content": "again"}
GROUP = 3
BATCH = PromptBatch(ASKED, [[1]] * len(ASKED), {}, [0, 1], [0, 0])


@pytest.fixture(scope="module")
def policy() -> nn.Module:
    return MODEL.load().eval()


def draw(policy: nn.Module, function: Callable[..., Any], group: int = GROUP, **settings: Any) -> Completions:
    source = RolloutCalls(RolloutFunction(function, **settings), MODEL.tokenizer, {}, 80)
    return RolloutRequest(
        BATCH,
        policy,
        sampling=Sampling(max_new_tokens=6),
        group_size=group,
        vocabulary=Vocabulary.of(MODEL),
        version=7,
        seed=3,
        interaction=source,
    ).send_to(NativeGenerator())()


def by(agent: Agent[Any], **settings: Any) -> Callable[..., Any]:
    """The rollout function in which this agent writes every completion."""
    return lambda prompts, trainer: ChatEndpoint(trainer, **settings).play(agent).rollout


def sound(played: Played[Any]) -> dict[str, list[Any]]:
    """The rollout, where no agent raised: what one asserts would else be a result among others."""
    for result in played.results:
        if isinstance(result, Exception):
            raise result
    return played.rollout


def post(url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    asked = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), method="POST")
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


async def ask(url: str, messages: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    status, body = await asyncio.to_thread(post, url, {"model": "policy", "messages": list(messages), **more})
    return {"status": status, **json.loads(body)}


def said(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["status"] == 200, answer
    return answer["choices"][0]["message"]


async def one_turn(row: int, url: str) -> str:
    return said(await ask(url, ASKED[row // GROUP]))["content"]


async def two_turns(row: int, url: str) -> None:
    first = said(await ask(url, ASKED[row // GROUP]))
    said(await ask(url, [*ASKED[row // GROUP], first, AGAIN]))


def same(ours: Completions, theirs: Completions) -> None:
    for name in ("prompt_ids", "response_ids", "response_mask", "ended", "group_id", "attended", "turn"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert (mine is None) == (other is None) and (mine is None or torch.equal(mine, other)), name
    torch.testing.assert_close(ours.sampler_logprobs, theirs.sampler_logprobs, atol=1e-4, rtol=0)


def masked(function: Callable[..., Any]) -> Callable[..., Any]:
    """With the mask that says that every token is the policy's, as an endpoint says it."""

    def whole(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        out = function(prompts, trainer)
        return {"env_mask": [[1] * len(ids) for ids in out["completion_ids"]], **out}

    return whole


def by_hand(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
    """Two turns without any server."""
    frames = ChatFrames(MODEL.tokenizer, eos_ids=MODEL.eos_ids, kinds=["user"])
    out = trainer.generate([trainer.encode(prompt) for prompt in prompts])
    between = [frames.encode([AGAIN], closed=ids[-1] in MODEL.eos_ids) for ids in out["completion_ids"]]
    texts = [a + b + c for a, b, c in zip(out["prompt_ids"], out["completion_ids"], between)]
    second = trainer.generate(texts)
    parts = list(zip(out["completion_ids"], between, second["completion_ids"]))
    return {
        "prompt_ids": out["prompt_ids"],
        "completion_ids": [a + b + c for a, b, c in parts],
        "logprobs": [x + [0.0] * len(b) + y for x, (_, b, _), y in zip(out["logprobs"], parts, second["logprobs"])],
        "env_mask": [[1] * len(a) + [0] * len(b) + [1] * len(c) for a, b, c in parts],
        "ended": second["ended"],
    }


def test_an_agent_of_one_turn_writes_what_the_generator_draws(policy: nn.Module) -> None:
    plain = masked(lambda prompts, trainer: trainer.generate([trainer.encode(prompt) for prompt in prompts]))
    ours, theirs = draw(policy, by(one_turn)), draw(policy, plain)
    same(ours, theirs)
    assert torch.equal(ours.sampler_logprobs, theirs.sampler_logprobs), "one batch, to the bit"


def test_an_agent_of_two_turns_writes_what_is_drawn_by_hand(policy: nn.Module) -> None:
    ours = draw(policy, by(two_turns))
    same(ours, draw(policy, by_hand))
    assert ours.attended is not None and (ours.attended & ~ours.response_mask).any()


def test_rewards_are_given_what_agent_and_policy_said_message_by_message(policy: nn.Module) -> None:
    drawn = draw(policy, by(two_turns))
    _, completions, _ = as_reward_input(BATCH, [""] * len(drawn), drawn.episodes)
    assert drawn.turn is not None
    for row, messages in enumerate(completions):
        own = [drawn.response_ids[row][drawn.response_mask[row] & (drawn.turn[row] == turn)] for turn in (0, 1)]
        first, second = (MODEL.tokenizer.decode(ids, skip_special_tokens=True) for ids in own)
        assert messages == [{"role": "assistant", "content": first}, AGAIN, {"role": "assistant", "content": second}]


def test_samples_do_not_depend_on_who_asks_when(policy: nn.Module) -> None:
    async def slow(row: int, url: str) -> None:
        await asyncio.sleep(0.1 * (row % 3))
        await two_turns(row, url)

    same(draw(policy, by(slow, patience=0.02)), draw(policy, by(two_turns)))


def test_those_who_wait_for_each_other_are_answered(policy: nn.Module) -> None:
    gate = asyncio.Semaphore(2)

    async def two_at_a_time(row: int, url: str) -> None:
        async with gate:
            await one_turn(row, url)

    same(draw(policy, by(two_at_a_time, patience=0.05)), draw(policy, by(one_turn)))


def test_who_waits_is_answered_though_others_ask_for_what_is_refused(policy: nn.Module) -> None:
    answered, gave_up = asyncio.Event(), []

    async def nags(row: int, url: str) -> None:
        prompt = ASKED[row // GROUP]
        first = said(await ask(url, prompt))
        if row == 0:
            said(await ask(url, [*prompt, first, AGAIN]))
            answered.set()
            return
        for _ in range(200):
            if answered.is_set():
                return
            assert (await ask(url, [{"role": "user", "content": "another"}]))["status"] == 400
            await asyncio.sleep(0.02)
        gave_up.append(row)

    draw(policy, by(nags, patience=0.2), max_tokens=200)
    assert answered.is_set() and not gave_up


def test_agents_that_block_a_thread_each_do_not_wait_for_threads(policy: nn.Module) -> None:
    async def blocks(row: int, url: str) -> None:
        await ask(url, ASKED[row // 20])

    begun = time.perf_counter()
    assert len(draw(policy, by(blocks, patience=60.0), group=20)) == 40
    assert time.perf_counter() - begun < 20


def test_it_works_where_a_loop_runs_already(policy: nn.Module) -> None:
    async def notebook() -> Completions:
        drawn = draw(policy, by(one_turn))
        await asyncio.sleep(0)  # the loop is the one that it was
        return drawn

    same(asyncio.run(notebook()), draw(policy, by(one_turn)))


def test_a_stream_tells_the_same(policy: nn.Module) -> None:
    told: dict[int, list[Any]] = {}

    async def streamed(row: int, url: str) -> None:
        _, body = await asyncio.to_thread(post, url, {"messages": ASKED[row // GROUP], "stream": True})
        lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        told[row] = [json.loads(line) for line in lines[:-1]]

    drawn = draw(policy, by(streamed))
    same(drawn, draw(policy, by(one_turn)))
    for row, chunks in told.items():
        text = MODEL.tokenizer.decode(drawn.response_ids[row][drawn.response_mask[row]], skip_special_tokens=True)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": text}
        assert chunks[1]["choices"][0]["finish_reason"] == ("stop" if drawn.ended[row] else "length")
        assert chunks[2]["usage"]["completion_tokens"] == drawn.response_mask[row].sum()


def test_what_an_agent_returns_and_raises_is_told(policy: nn.Module) -> None:
    played: list[Any] = []

    async def fails(row: int, url: str) -> str:
        text = await one_turn(row, url)
        if row == 4:
            raise KeyError("tool")
        return text

    def function(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        played.append(ChatEndpoint(trainer).play(fails))
        return played[0].rollout

    same(draw(policy, function), draw(policy, by(one_turn)))
    kinds = [type(result) for result in played[0].results]
    assert kinds == [str] * 4 + [KeyError] + [str]
    drawn = draw(policy, function)
    assert drawn.episodes is not None
    assert [each.failed for each in drawn.episodes] == [kind is KeyError for kind in kinds]
    assert drawn.episodes[4].error == "KeyError: 'tool'" and drawn.episodes[4].messages, "what was said until then"

    async def at_once(row: int, url: str) -> None:
        raise KeyError("tool")

    with pytest.raises(GenerationError, match="completion 0 .*KeyError: 'tool'"):
        draw(policy, by(at_once))

    def kept(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        return ChatEndpoint(trainer).play(at_once, instead=prompts).rollout

    same(draw(policy, kept), draw(policy, by(one_turn)))


def test_an_agent_that_ends_where_a_completion_is_full_has_not_failed(policy: nn.Module) -> None:
    """The policy has talked for too long, which is no fault of the agent: the completion is cut, and scored."""
    raised: list[Any] = []

    async def goes_on(row: int, url: str) -> None:
        told = list(ASKED[row // GROUP])
        while True:
            answer = await ask(url, told)
            if answer["status"] != 200:
                raise RuntimeError(answer["error"]["code"])
            told += [said(answer), AGAIN]

    def function(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        played = ChatEndpoint(trainer).play(goes_on)
        raised.extend(map(str, played.results))
        return played.rollout

    drawn = draw(policy, function, max_tokens=60)
    assert drawn.episodes is not None and raised == ["context_length_exceeded"] * len(drawn)
    assert {each.end for each in drawn.episodes} == {"cut"} and not drawn.ended.any()


def test_an_agent_is_told_what_it_may_not_ask(policy: nn.Module) -> None:
    answers: list[dict[str, Any]] = []
    told = asyncio.Event()

    async def tries(row: int, url: str) -> None:
        prompt = ASKED[row // GROUP]
        if row == 0:
            answers.append(await ask(url, prompt, n=2))
            answers.append(await ask(url.replace(url.split("/")[3], "guess"), prompt))
            answers.append(await ask(url.replace("/0/v1", "/77/v1"), prompt))
            both = [asyncio.ensure_future(ask(url, prompt, max_tokens=most)) for most in (6, 7)]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            told.set()
            answers.extend(sorted(await asyncio.gather(*both), key=lambda each: -each["status"]))
            answers.append(await ask(url, [{"role": "user", "content": "another"}]))
        else:
            await told.wait()  # until then the policy is asked by one alone, and does not answer
            await one_turn(row, url)

    same(draw(policy, by(tries)), draw(policy, by(one_turn)))
    assert [answer["status"] for answer in answers] == [400, 404, 409, 400, 200, 400]
    words = [answer.get("error", {}).get("message", "") for answer in answers]
    assert "n cannot be asked" in words[0] and "one turn of a completion at a time" in words[3]
    assert "begins or rewrites another" in words[5]


def test_a_body_is_read_by_those_who_know_the_key_and_up_to_a_size(
    policy: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user of this machine may send one."""
    monkeypatch.setattr(chat_endpoint, "_LARGEST_BODY", 2**20)
    monkeypatch.setattr(chat_endpoint, "read_request", lambda body: sizes.append(len(body)) or read_request(body))
    sizes: list[int] = []
    answers: list[tuple[int, bool]] = []

    def sends(url: str, key: str | None, size: str | None, body: bytes) -> tuple[int, bool]:
        """The status, and whether the connection goes on."""
        there = urllib.parse.urlsplit(url)
        path = there.path if key is None else there.path.replace(there.path.split("/")[1], key)
        line = http.client.HTTPConnection(str(there.hostname), there.port, timeout=60)
        line.putrequest("POST", f"{path}/chat/completions")
        if size is not None:
            line.putheader("Content-Length", size)
        line.endheaders(body)
        answer = line.getresponse()
        answer.read()
        goes_on = not answer.will_close
        line.close()
        return answer.status, goes_on

    async def tries(row: int, url: str) -> None:
        if row == 0:
            most = b" " * 2**20  # more is said to come, and is not waited for
            for key, size, body in [
                *(("guess", "2", b"{}"), ("guess", f"{2**60}", most), ("guess", "-1", b"")),
                *((None, f"{2**20 + 1}", most), (None, f"{2**60}", most)),
                *((None, "-1", b""), (None, "x", b""), (None, None, b""), (None, "2", b"{}")),
            ]:
                answers.append(await asyncio.to_thread(sends, url, key, size, body))
        await one_turn(row, url)

    same(draw(policy, by(tries, patience=60.0)), draw(policy, by(one_turn)))
    assert answers == [(404, False)] * 3 + [(413, False)] * 5 + [(400, True)]
    assert 2 in sizes and max(sizes) < 1000, "what is refused is not read"


def test_a_short_turn_is_short_and_the_room_is_kept(policy: nn.Module) -> None:
    async def short(row: int, url: str) -> None:
        first = await ask(url, ASKED[row // GROUP], max_tokens=1 + row % 2)
        assert first["usage"]["completion_tokens"] <= 1 + row % 2
        await ask(url, [*ASKED[row // GROUP], said(first), AGAIN])

    drawn = draw(policy, by(short), max_tokens=60)
    assert drawn.attended is not None and drawn.attended.sum(1).max() <= 60


def test_rows_that_have_less_room_left_are_drawn_with_the_others(policy: nn.Module) -> None:
    """Near the limit of tokens every completion has room of its own."""
    calls: list[Any] = []

    def counted(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        generate = trainer._generate

        def generated(asked: Any, sampling: Sampling) -> Completions:
            calls.append((len(asked) * asked.group_size, sampling.max_new_tokens))
            return generate(asked, sampling)

        trainer._generate = generated
        return sound(ChatEndpoint(trainer, patience=60.0).play(uneven))

    rooms: dict[int, int] = {}

    async def uneven(row: int, url: str) -> None:
        prompt = ASKED[row // GROUP]
        first = said(await ask(url, prompt))
        answer = await ask(url, [*prompt, first, {"role": "user", "content": "again" + "!" * row}])
        rooms[row] = answer["usage"]["completion_tokens"]

    limit = max(draw(policy, by(two_turns)).attended.sum(1)) + GROUP  # type: ignore[union-attr]
    drawn = draw(policy, counted, max_tokens=int(limit))
    assert [rows for rows, _ in calls] == [len(drawn)] * 2, "one call a turn"
    assert len(set(rooms.values())) > 1 and drawn.attended is not None and drawn.attended.sum(1).max() <= limit


def test_a_request_that_is_sent_again_is_answered_again_and_nothing_is_drawn(policy: nn.Module) -> None:
    """A client that lost the answer, or waits no longer for it, knows no better."""

    def lost(url: str, messages: Sequence[dict[str, Any]]) -> None:
        """Ask, and hang up before the answer is there."""
        there = urllib.parse.urlsplit(url)
        line = http.client.HTTPConnection(str(there.hostname), there.port)
        line.request("POST", f"{there.path}/chat/completions", json.dumps({"messages": list(messages)}))
        line.close()

    async def twice(row: int, url: str) -> None:
        prompt = ASKED[row // GROUP]
        if row % 2:
            await asyncio.to_thread(lost, url, prompt)
        else:
            await asyncio.sleep(0.3)  # the others' first request waits for this one, and so does their second
        first = await ask(url, prompt)
        assert await ask(url, prompt) == first
        told = [*prompt, said(first), AGAIN]
        second = await ask(url, told)
        assert (await ask(url, prompt))["status"] == 400, "something newer was asked"
        assert await ask(url, told) == second
        assert (await ask(url, told, max_tokens=2))["status"] == 400, "another request"

    drawn = draw(policy, lambda prompts, trainer: sound(ChatEndpoint(trainer).play(twice)))
    same(drawn, draw(policy, by(two_turns)))


def test_an_agent_whose_time_is_over_is_cut_and_the_others_go_on(policy: nn.Module) -> None:
    played: list[Any] = []
    left: list[int] = []

    async def hangs(row: int, url: str) -> str:
        text = await one_turn(row, url)
        if row in (1, 5):
            try:
                await asyncio.sleep(60)
            finally:
                left.append(row)
        said(await ask(url, [*ASKED[row // GROUP], {"role": "assistant", "content": text}, AGAIN]))
        return text

    def function(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        played.append(ChatEndpoint(trainer, agent_timeout=2.0, patience=0.2).play(hangs))
        return played[0].rollout

    drawn, whole, short = draw(policy, function), draw(policy, by(two_turns)), draw(policy, by(one_turn))
    assert sorted(left) == [1, 5] and drawn.turn is not None
    for row, result in enumerate(played[0].results):
        late = row in (1, 5)
        assert isinstance(result, TimeoutError if late else str), result
        other = short if late else whole
        mine, others = (each.response_ids[row][each.response_mask[row]] for each in (drawn, other))
        assert torch.equal(mine, others)
        assert bool(drawn.ended[row]) == (not late and bool(whole.ended[row]))
    assert str(played[0].results[1]) == "the agent took longer than agent_timeout=2 s"
    assert drawn.episodes is not None
    assert [each.end == "timeout" for each in drawn.episodes] == [row in (1, 5) for row in range(6)]


def test_an_agent_that_is_late_before_its_first_turn_ends_the_run_or_is_answered_once(policy: nn.Module) -> None:
    async def never(row: int, url: str) -> None:
        await asyncio.sleep(60)

    with pytest.raises(GenerationError, match="never had a turn .*TimeoutError.* agent_timeout=0.2 s"):
        draw(policy, by(never, agent_timeout=0.2))

    def kept(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        return ChatEndpoint(trainer, agent_timeout=0.2).play(never, instead=prompts).rollout

    same(draw(policy, kept), draw(policy, by(one_turn)))


def test_a_template_that_tells_of_no_tools_ends_the_rollout(policy: nn.Module) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

    async def calls(row: int, url: str) -> None:
        await ask(url, ASKED[row // GROUP], tools=[tool])

    with pytest.raises(ConfigError, match="does not tell the policy of the tools: add"):
        draw(policy, by(calls, parser="hermes"))


def test_a_template_that_cannot_render_ends_the_rollout(policy: nn.Module) -> None:
    async def wizard(row: int, url: str) -> None:
        await ask(url, [{"role": "user", "content": "<|im_end|>"}])

    with pytest.raises(DataError, match="control token"):
        draw(policy, by(wizard))


def test_an_agent_that_asks_nothing_is_ended_by_the_limit_of_the_rollout(policy: nn.Module) -> None:
    async def sleeps(row: int, url: str) -> None:
        await one_turn(row, url)
        await asyncio.sleep(60)

    begun = time.perf_counter()
    with pytest.raises(LitRLError, match="rollout_timeout=1"):
        draw(policy, by(sleeps), rollout_timeout=1.0)
    assert time.perf_counter() - begun < 20


# ------------------------------------------------------------------ an agent that shortens its history

SHORT = {"role": "user", "content": "short: "}


async def compacts(row: int, url: str) -> str:
    """Two turns; then, in completions of every other row, a third one behind a history of one message."""
    prompt = ASKED[row // GROUP]
    told = [*prompt, said(await ask(url, prompt)), AGAIN]
    told.append(said(await ask(url, told)))
    if row % 2:
        summary = {**SHORT, "content": SHORT["content"] + told[-1]["content"]}
        return said(await ask(url, [summary]))["content"]
    return told[-1]["content"]


def test_a_history_that_was_shortened_is_scored_as_it_was_drawn(policy: nn.Module) -> None:
    """Behind what the policy read then; the completions that do not fork are those of an agent that never does."""
    drawn, plain = draw(policy, by(compacts), max_branches=2), draw(policy, by(two_turns))
    assert drawn.follows is not None and drawn.episodes is not None and plain.follows is None
    forked = torch.tensor([each.branches == 2 for each in drawn.episodes])
    assert forked.tolist() == [bool(row % 2) for row in range(len(drawn))]
    scored = score(policy, drawn, Sampling(max_new_tokens=6)).logprobs
    mask = drawn.response_mask
    torch.testing.assert_close(scored[mask], drawn.sampler_logprobs[mask], atol=1e-4, rtol=0)
    other = score(policy, dataclasses.replace(drawn, follows=None), Sampling(max_new_tokens=6)).logprobs
    assert (other - drawn.sampler_logprobs)[mask].abs().max() > 0.1, "behind other tokens it would be another number"
    same(trim(select(dataclasses.replace(drawn, follows=None), (~forked).nonzero()[:, 0])),
         trim(select(plain, (~forked).nonzero()[:, 0])))  # fmt: skip
    for row, episode in enumerate(drawn.episodes):
        assert episode.forks == ([[2, None]] if row % 2 else []) and episode.turns == 2 + row % 2
        if row % 2:
            summary = {**SHORT, "content": SHORT["content"] + episode.messages[2]["content"]}
            assert episode.messages[3] == summary and "(turn 2 begins another text)" in episode.transcript()


def test_with_one_branch_a_row_is_as_it_was_and_its_episode_says_nothing_of_branches(policy: nn.Module) -> None:
    one, more = draw(policy, by(two_turns)), draw(policy, by(two_turns), max_branches=4)
    same(one, more)
    assert one.follows is None and more.follows is None and torch.equal(one.sampler_logprobs, more.sampler_logprobs)
    assert one.episodes is not None and {each.branches for each in one.episodes} == {None}
    assert more.episodes is not None and {each.branches for each in more.episodes} == {1}


def test_an_agent_that_begins_too_many_texts_is_cut_and_scored(policy: nn.Module) -> None:
    async def begins_anew(row: int, url: str) -> None:
        said(await ask(url, ASKED[row // GROUP]))
        for number in range(5):
            answer = await ask(url, [{"role": "user", "content": f"{number}"}])
            if answer["status"] != 200:
                raise RuntimeError(answer["error"]["code"])

    drawn = draw(policy, by(begins_anew), max_branches=3)
    assert drawn.episodes is not None and not drawn.ended.any()
    assert {(each.end, each.branches, each.turns, each.failed) for each in drawn.episodes} == {("max_branches", 3, 3, False)}  # fmt: skip  # noqa: E501
