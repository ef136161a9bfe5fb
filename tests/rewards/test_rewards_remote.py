"""Rewards over HTTP against a real server of this process: retries, refusals, and never a made-up number."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import math
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image
from standin_judge import StandInJudge, standing_in_for_a_judge
from waiting import until

from lit_rl.core import http_client
from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.core.http_client import HTTP_LOOP
from lit_rl.core.visuals import ImageRef, VideoRef, digest_of
from lit_rl.rewards import RemoteReward, Rewards

Reply = tuple[int, Any]


@pytest.fixture
def serve() -> Iterator[Callable[..., StandInJudge]]:
    """`serve(reply)`: a server that answers with the status and the JSON, or bytes, of `reply(body, number)`."""
    with contextlib.ExitStack() as servers:

        def start(reply: Callable[[dict[str, Any], int], Reply]) -> StandInJudge:
            def answer(body: dict[str, Any], number: int) -> tuple[int, bytes]:
                status, said = reply(body, number)
                return status, said if isinstance(said, bytes) else json.dumps(said).encode()

            server = servers.enter_context(standing_in_for_a_judge())
            server.answer = answer
            return server

        yield start


@pytest.fixture
def dead() -> str:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def lengths(body: dict[str, Any], number: int) -> Reply:
    return 200, {"rewards": [float(len(c)) for c in body["completions"]]}


def hangs(body: dict[str, Any], number: int) -> Reply:
    time.sleep(5)
    return 200, {"rewards": [7.0]}


def ask(reward: RemoteReward, completions: list[str], **columns: Any) -> list[float | None]:
    return asyncio.run(reward(["p"] * len(completions), completions, **columns))


def quick(*urls: str, **settings: Any) -> RemoteReward:
    return RemoteReward(list(urls), **{"backoff": 0.01, "timeout": 5.0, **settings})


def test_what_is_sent_and_what_comes_back(serve):
    server = serve(lambda body, number: (200, {"rewards": [1, None, -0.5]}))
    rewards = Rewards({"remote": quick(server.url)})
    rewards.bind(["answer"])
    messages = [[{"role": "user", "content": "é"}]] * 3
    replies = [[{"role": "assistant", "content": text}] for text in ("a", "b", "c")]
    scores = rewards.score(messages, replies, {"answer": ["x", None, 3]}, completion_ids=[[1]] * 3)
    assert [None if math.isnan(v) else v for v in scores.total.tolist()] == [1.0, None, -0.5]
    columns = {"answer": ["x", None, 3]}
    assert server.asked == [{"prompts": messages, "completions": replies, "columns": columns, "path": "/v1"}]
    assert (server.types, server.headers) == (["application/json"], [None])


def test_batches_go_round_robin_and_keep_their_order(serve):
    servers = [serve(lengths), serve(lengths)]
    completions = ["x" * n for n in range(10)]
    assert ask(quick(*(s.url for s in servers), batch_size=3), completions) == [float(n) for n in range(10)]
    assert [len(server.asked) for server in servers] == [2, 2]
    assert ask(quick(servers[0].url), []) == []


FAULTS: dict[str, Reply] = {
    "500": (500, {"error": "out of memory"}),
    "429": (429, b"slow down"),
    "no json": (200, b"<html>"),
    "not utf-8": (200, b"\xff\xfe{"),
    "deeper than Python counts": (200, b"[" * 10**5),
    "no rewards": (200, {"scores": [1.0, 1.0]}),
    "a list": (200, [1.0, 1.0]),
    "fewer": (200, {"rewards": [1.0]}),
    "more": (200, {"rewards": [1.0] * 3}),
    "nan": (200, b'{"rewards": [NaN, 1.0]}'),
    "too large for a float": (200, b'{"rewards": [1e999, 1.0]}'),
    "an integer too large for a float": (200, b'{"rewards": [1' + b"0" * 400 + b", 1.0]}"),
    "text": (200, {"rewards": ["1.0", 1.0]}),
    "bool": (200, {"rewards": [True, 1.0]}),
    "nested": (200, {"rewards": [[1.0], [1.0]]}),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_asked_again_and_is_no_reward(serve, fault):
    server = serve(lambda body, number: fault if number < 3 else lengths(body, number))
    assert ask(quick(server.url, attempts=3), ["a", "bb"]) == [1.0, 2.0]
    assert len(server.asked) == 3

    server = serve(lambda body, number: fault)
    with pytest.raises(RewardError, match=r"2 completions in 2 attempts") as caught:
        ask(quick(server.url, attempts=2), ["a", "bb"])
    assert server.url in str(caught.value) and len(server.asked) == 2


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("500", "answered 500 .*out of memory"),
        ("fewer", r"rewards is \[1.0\], and has to be a list of 2, one for each completion"),
        ("nan", r"rewards\[0\] is NaN, and has to be a finite number, or null"),
    ],
)
def test_the_last_fault_is_told(serve, fault, told):
    server = serve(lambda body, number: FAULTS[fault])
    with pytest.raises(RewardError, match=told):
        ask(quick(server.url, attempts=1), ["a", "bb"])


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_wherever_it_leads(serve, status, monkeypatch):
    """Where it leads there are valid scores to be had, for the token."""
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    elsewhere = serve(lengths)
    server = serve(lambda body, number: (status, elsewhere.url.encode()))
    with pytest.raises(RewardError, match=f"answered {status}"):
        ask(quick(server.url, token_env="REWARD_TOKEN", attempts=2), ["a"])
    assert len(server.asked) == 2 and elsewhere.headers == []


def test_an_answer_without_end_is_left(serve, monkeypatch):
    monkeypatch.setattr(http_client, "_LARGEST_JSON", 2**20)
    server = serve(lambda body, number: (200, b"[" * 2**21))
    with pytest.raises(RewardError, match=f"the answer is larger than {2**20} bytes"):
        ask(quick(server.url, attempts=1), ["a"])


def test_a_slow_server_is_left(serve):
    slow, fast = serve(hangs), serve(lengths)
    assert ask(quick(slow.url, fast.url, timeout=0.3), ["abc"]) == [3.0]
    with pytest.raises(RewardError, match="no answer within 0.[13] seconds"):
        ask(quick(slow.url, timeout=0.1, attempts=1), ["abc"])


def test_nothing_waits_on_for_a_server_that_hangs_on_every_request(serve):
    slow = serve(hangs)
    with pytest.raises(RewardError, match="no answer within 0.[13] seconds"):
        ask(quick(slow.url, timeout=0.3, attempts=1, batch_size=1), ["abc"] * 9)

    async def open_requests() -> int:
        return len(asyncio.all_tasks() - {asyncio.current_task()})

    assert until(lambda: HTTP_LOOP.wait(open_requests()) == 0, 3.0)


def test_a_server_that_asks_to_be_left_alone_is():
    times = list[float]()

    def reply(body: dict[str, Any], number: int) -> tuple[Any, ...]:
        times.append(time.monotonic())
        return (503, b"", {"Retry-After": "0.5"}) if number == 1 else (200, b'{"rewards": [1.0]}')

    with standing_in_for_a_judge() as server:
        server.answer = reply
        assert ask(quick(server.url), ["a"]) == [1.0]
    assert len(times) == 2 and times[1] - times[0] >= 0.5


def test_a_dead_server_of_two_costs_nothing_but_the_try(serve, dead):
    server = serve(lengths)
    completions = ["x" * n for n in range(6)]
    assert ask(quick(dead, server.url, batch_size=1, backoff=1000), completions) == [float(n) for n in range(6)]


def test_nobody_there(dead):
    with pytest.raises(RewardError, match=r"(?s)1 completions in 2 attempts.*refused"):
        ask(quick(dead, attempts=2), ["a"])


def test_the_run_ends_with_the_code_of_rewards(dead):
    with pytest.raises(RewardError, match="'remote'") as caught:
        Rewards({"remote": quick(dead, attempts=1)}).score(["p"], ["c"], {})
    assert caught.value.exit_code == 4


class TestToken:
    def test_is_read_from_the_environment_and_told_to_nobody(self, serve, monkeypatch):
        monkeypatch.setenv("REWARD_TOKEN", "s3cret")
        server = serve(lambda body, number: (403, b"no"))
        reward = quick(server.url, token_env="REWARD_TOKEN", attempts=1)
        with pytest.raises(RewardError) as caught:
            ask(reward, ["a"])
        assert server.headers == ["Bearer s3cret"]
        assert "s3cret" not in f"{caught.value}{reward!r}" and b"s3cret" not in pickle.dumps(reward)


class TestColumns:
    def test_only_the_named_ones_are_sent_and_asked_for(self, serve):
        server = serve(lengths)
        rewards = Rewards({"remote": quick(server.url, columns=["answer"])})
        with pytest.raises(RewardError, match="'answer'"):
            rewards.bind(["question"])
        rewards.score(["p"], ["c"], {"answer": ["x"], "huge": [object()]})
        assert server.asked[0]["columns"] == {"answer": ["x"]}

    @pytest.mark.parametrize("value", [object(), {1, 2}, math.nan])
    def test_what_is_no_json_is_named(self, value):
        with pytest.raises(RewardError, match="column 'picture'"):
            ask(quick("http://localhost:1"), ["a"], picture=[value])

    def test_images_and_videos_are_sent_as_their_encoded_bytes(self, serve, tmp_path):
        png, jpeg = io.BytesIO(), io.BytesIO()
        Image.new("RGB", (3, 2), "red").save(png, "PNG")
        Image.new("RGB", (4, 4), "blue").save(jpeg, "JPEG")
        (tmp_path / "a.jpg").write_bytes(jpeg.getvalue())
        held = ImageRef.held("a", 3, 2, png.getvalue())
        filed = ImageRef("b", digest_of(jpeg.getvalue()), 4, 4, path=tmp_path / "a.jpg")
        said = [{"role": "tool", "content": [{"type": "image", "image": held}]}]
        columns = {"image": [held, None], "videos": [None, [VideoRef((filed, filed), 2.0)]]}
        server = serve(lengths)
        ask(quick(server.url), [said, said], **columns)
        (body,) = server.asked
        one = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
        two = f"data:image/jpeg;base64,{base64.b64encode(jpeg.getvalue()).decode()}"
        assert body["columns"] == {"image": [one, None], "videos": [None, [{"frames": [two, two], "fps": 2.0}]]}
        assert body["completions"][1] == [{"role": "tool", "content": [{"type": "image", "image": one}]}]

    def test_what_an_environment_gave_and_is_no_json_is_not_sent(self):
        shown = [{"role": "user", "content": [{"type": "image", "image": object()}]}]
        with pytest.raises(RewardError, match="the episodes cannot be sent as JSON"):
            ask(quick("http://localhost:1"), [shown])


def test_an_address_with_a_password_is_refused_without_a_word_of_it():
    with pytest.raises(ConfigError, match="urls") as caught:
        RemoteReward(["https://me:pw@host/x"])
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["https://rewards.example/x", "http://localhost:8000", "http://127.0.0.1", "http://[::1]:80/x"]
)
def test_addresses_that_are_taken(url):
    assert RemoteReward(url).urls == RemoteReward([url]).urls == [url]


def test_an_address_that_is_not_encrypted_may_be_allowed():
    assert RemoteReward(["http://rewards.example/x"], allow_http=True).urls
