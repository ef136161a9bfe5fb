"""Whatever a server answers, a run goes on with it or ends with an error that names the server."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from standin_server import Behaviour, Handler, drips, hangs, routed, standing_in
from standin_server import answers as answering
from waiting import until

from lit_rl.core.errors import GenerationError
from lit_rl.core.http_client import HTTP_LOOP, JSONValue
from lit_rl.generation.generator import EngineLost
from lit_rl.generation.vllm import client as answers
from lit_rl.generation.vllm import client as calls
from lit_rl.generation.vllm import launch
from lit_rl.generation.vllm import server_engine as asking
from lit_rl.generation.vllm.client import Client, ServerDead, ServerRefused
from lit_rl.generation.vllm.engine import EngineAnswer, Facts, ImagePrompt, Request, complete
from lit_rl.generation.vllm.in_process import read_output
from lit_rl.generation.vllm.launch import responsive_servers, wait_for_servers
from lit_rl.generation.vllm.server_engine import ServerEngine
from lit_rl.generation.vllm.transports import Gloo, own_address

wait = HTTP_LOOP.wait

VOCABULARY = 40
FIELDS = {"n": 2, "max_tokens": 3, "logprobs": 0}
PLAIN = Request([5, 6, 7], {**FIELDS, "prompt_logprobs": 0})
SEEN = Request([5, 6, 7], FIELDS, ImagePrompt([5, 6], (), 0))

FACTS = {
    "instance": "a",
    "version": 3,
    "model": {"model_type": "llama", "tied": True, "hidden_size": 64, "vocab_size": VOCABULARY},
    "dtype": "float32",
    "max_model_len": 64,
    "block_size": 16,
    "logprobs_mode": "processed_logprobs",
    "max_num_seqs": 8,
    "max_lora_rank": None,
    "device": "cpu",
}
MODELS = {"object": "list", "data": [{"id": "policy", "max_model_len": 64}, {"id": "adapter"}]}
SCORED = [None, {"6": {"logprob": -1.5, "rank": 2}, "9": {"logprob": -0.5}}, {"7": {"logprob": -9999.0}}]
COMPLETIONS = {
    "id": "cmpl-1",
    "choices": [
        {
            "index": 1,
            "text": "ab",
            "token_ids": [8, 39],
            "logprobs": {"token_logprobs": [-0.25, 0]},
            "finish_reason": "stop",
            "prompt_logprobs": SCORED,
        },
        {
            "index": 0,
            "text": "abc",
            "token_ids": [0, 1, 2],
            "logprobs": {"token_logprobs": [-0.125, -1e-7, 1e-6]},
            "finish_reason": "length",
            "prompt_logprobs": SCORED,
        },
    ],
}
DRAWN = {
    "prompt_token_ids": [5, 6, 7],
    "choices": [
        {
            "index": index,
            "token_ids": [8, 39],
            "logprobs": {"content": [{"token_id": 8, "logprob": -0.25}, {"token_id": 39, "logprob": -9999.0}]},
            "finish_reason": "stop",
        }
        for index in range(2)
    ],
}
ANSWERS: dict[str, Any] = {
    "/v1/models": MODELS,
    "/collective_rpc": lambda body: {"results": [FACTS if body["method"] == "lit_rl_facts" else None]},
    "/get_world_size": {"world_size": 1},
    "/reset_prefix_cache": {"success": True},
    "/v1/completions": COMPLETIONS,
    "/inference/v1/generate": DRAWN,
}


def changed(good: Any, *path: str | int, to: Any) -> Any:
    """A copy with another value somewhere; of `...` the place is taken out."""
    if not path:
        return to
    found = place = copy.deepcopy(good)
    for step in path[:-1]:
        place = place[step]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return found


def use(url: str) -> tuple[list[EngineAnswer], list[EngineAnswer]]:
    """Whatever a run asks of a server."""
    client = Client(url)
    transport = Gloo([client], 5.0)
    engine = ServerEngine([client], transport, say=str, deadline=5.0, answer_deadline=5.0)
    engine.pause()
    engine.begin({})
    assert wait(client.world_size(5.0)) == 1
    engine.reset_caches()
    engine.resume()
    plain, seen = complete(engine, [PLAIN, SEEN])
    return plain, seen


def models(*path: str | int, to: Any) -> tuple[str, Any]:
    return "/v1/models", changed(MODELS, *path, to=to)


def facts(*path: str | int, to: Any) -> tuple[str, Any]:
    return "/collective_rpc", {"results": [changed(FACTS, *path, to=to)]}


def completions(*path: str | int, to: Any) -> tuple[str, Any]:
    return "/v1/completions", changed(COMPLETIONS, *path, to=to)


def first(*path: str | int, to: Any) -> tuple[str, Any]:
    return completions("choices", 0, *path, to=to)


def drawn(*path: str | int, to: Any) -> tuple[str, Any]:
    return "/inference/v1/generate", changed(DRAWN, *path, to=to)


def begins(results: Any) -> tuple[str, Any]:
    """What the workers say when an update begins."""
    return "/collective_rpc", lambda body: {"results": [FACTS]} if body["method"] == "lit_rl_facts" else results


MALFORMED: dict[str, tuple[str, Any]] = {  # each value as another kind: `test_a_value_of_another_kind_...`
    "models-list": ("/v1/models", []),
    "models-null": ("/v1/models", None),
    "no-model": models("data", to=[]),
    "model-text": models("data", to=["policy"]),
    "model-name-number": models("data", 0, "id", to=5),
    "model-name-control": models("data", 0, "id", to="\x1b[2J"),
    "model-length-text": models("data", 0, "max_model_len", to="64"),
    "facts-null-body": ("/collective_rpc", None),
    "facts-empty-body": ("/collective_rpc", ""),
    "facts-no-results": ("/collective_rpc", {"results": []}),
    "facts-results-null": ("/collective_rpc", {"results": None}),
    "facts-of-nobody": ("/collective_rpc", {"results": [None]}),
    "facts-text": ("/collective_rpc", {"results": ["\x1b[2J"]}),
    "facts-more": facts("colour\x1b", to="green"),
    "facts-less": facts("block_size", to=...),
    "instance-list": facts("instance", to=[]),
    "version-list": facts("version", to=[3]),
    "version-true": facts("version", to=True),
    "max_num_seqs-null": facts("max_num_seqs", to=None),
    "max_num_seqs-0": facts("max_num_seqs", to=0),
    "max_model_len-text": facts("max_model_len", to="64"),
    "block_size-huge": facts("block_size", to=2**31 - 1),
    "model-null": facts("model", to=None),
    "vocabulary-missing": facts("model", "vocab_size", to=...),
    "architecture-list": facts("model", "model_type", to=["llama"]),
    "architecture-control": facts("model", "model_type", to="\x1b[2J"),
    "size-of-no-name": facts("model", "\x1b[2J", to=[]),
    "begin-null": begins(None),
    "begin-no-results": begins({"results": []}),
    "workers-missing": ("/get_world_size", {}),
    "choices-number": completions("choices", to=3),
    "choices-fewer": completions("choices", 0, to=...),
    "index-missing": first("index", to=...),
    "index-twice": first("index", to=0),
    "finish-missing": first("finish_reason", to=...),
    "finish-abort": first("finish_reason", to="abort"),
    "tokens-missing": first("token_ids", to=...),
    "tokens-more": first("token_ids", to=[8] * 4),
    "token-of-no-vocabulary": first("token_ids", 1, to=VOCABULARY),
    "token-negative": first("token_ids", 1, to=-1),
    "token-true": first("token_ids", 1, to=True),
    "token-fraction": first("token_ids", 1, to=8.0),
    "logprobs-fewer": first("logprobs", "token_logprobs", to=[-0.25]),
    "logprob-infinite": first("logprobs", "token_logprobs", 1, to=-math.inf),
    "logprob-positive": first("logprobs", "token_logprobs", 1, to=0.5),
    "logprob-huge": first("logprobs", "token_logprobs", 1, to=10**400),
    "prompt-logprobs-short": first("prompt_logprobs", to=SCORED[:2]),
    "prompt-logprobs-of-another": first("prompt_logprobs", 2, to={"8": {"logprob": -1.0}}),
    "seen-prompt-missing": drawn("prompt_token_ids", to=...),
    "seen-prompt-number": drawn("prompt_token_ids", to=3),
    "seen-logprob-missing": drawn("choices", 1, "logprobs", "content", 0, "logprob", to=...),
    "seen-logprob-positive": drawn("choices", 1, "logprobs", "content", 0, "logprob", to=3.0),
}


def test_good_answers_are_read_to_the_bit() -> None:
    with standing_in(routed(ANSWERS)) as server:
        plain, seen = use(server.url)
        assert wait(Client(server.url).models(5.0)) == {"policy": 64, "adapter": None}
        assert wait(Client(server.url).facts(5.0)) == Facts(**FACTS)
    scored = [-1.5, -9999.0]
    assert plain == [
        EngineAnswer([0, 1, 2], [-0.125, -1e-7, 1e-6], False, scored),
        EngineAnswer([8, 39], [-0.25, 0.0], True, scored),
    ]
    assert [(each.token_ids, each.logprobs[0], each.ended, each.prompt_logprobs) for each in seen] == [
        ([8, 39], -0.25, True, None)
    ] * 2
    assert all(math.isnan(each.logprobs[1]) for each in seen), "the place that vLLM holds for NaN"


@pytest.mark.parametrize("route, answer", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_answer_is_an_error_that_names_the_server(route: str, answer: Any) -> None:
    with standing_in(routed(ANSWERS | {route: answer})) as server, pytest.raises(GenerationError) as refusal:
        use(server.url)
    message = str(refusal.value)
    assert refusal.value.exit_code == 5 and server.url in message and message.isprintable() and len(message) < 1000
    assert {"/collective_rpc": "rpc lit_rl_"}.get(route, route) in message
    assert "another version of vLLM or of lit_rl" in message and "Another program" in message


# ---------------------------------------------------------------------- what never comes, or never ends


async def open_requests() -> int:
    return len(asyncio.all_tasks() - {asyncio.current_task()})


@pytest.mark.parametrize("how", ["silent", "dripping"])
def test_nothing_waits_on_for_a_server_that_hangs_on_every_request(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of completions is an hour."""
    monkeypatch.setattr(asking, "_CHECK_EVERY", 0.3)
    hung, over = threading.Event(), threading.Event()

    def behave(handler: Handler) -> None:
        path = handler.path.partition("?")[0]
        hung.set() if path == "/v1/completions" else None
        if not hung.is_set():
            return routed(ANSWERS)(handler)
        if how == "dripping" and path == "/v1/completions":
            return drips(handler)
        over.wait(20)

    try:
        with standing_in(behave) as server:
            client = Client(server.url)
            options: Any = {"say": str, "deadline": 3600.0, "answer_deadline": 0.5}
            engine = ServerEngine([client], Gloo([client], 5.0), **options)
            with pytest.raises(EngineLost, match="no answer within"):
                complete(engine, [PLAIN] * 9)
            assert until(lambda: wait(open_requests()) == 0, 2.0), f"{wait(open_requests())} requests are left"
    finally:
        over.set()


def test_an_answer_without_end_takes_little_more_memory_than_the_largest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 MiB had taken 2.4 GiB."""
    largest = 2**24
    monkeypatch.setattr(calls, "LARGEST_ANSWER", largest)
    piece = b"[1," * 2**14

    def behave(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(10 * largest // len(piece)):
            handler.wfile.write(piece)

    with standing_in(lambda handler: _until_it_is_left(behave, handler)) as server:
        tracemalloc.start()
        try:
            with pytest.raises(ServerRefused, match=f"longer than {largest} bytes"):
                wait(Client(server.url).complete({}, 20.0))
            assert largest < tracemalloc.get_traced_memory()[1] < 1.5 * largest
        finally:
            tracemalloc.stop()


def _until_it_is_left(behave: Behaviour, handler: Handler) -> None:
    try:
        behave(handler)
    except OSError:
        handler.close_connection = True


JOINS: dict[str, tuple[Behaviour, str]] = {
    "refused": (answering({"error": "no\x1b[2J way"}, 500), "/collective_rpc: HTTP 500.* way"),
    "never answered": (hangs(2.0), "/collective_rpc: no answer within"),
    "answered and not done": (answering({"results": [None]}), "gloo transport: its workers did not join"),
}


@pytest.mark.parametrize("behaviour, said", JOINS.values(), ids=JOINS)
def test_a_server_that_does_not_join_the_transport_is_named(behaviour: Behaviour, said: str) -> None:
    def behave(handler: Handler) -> None:
        asked: Any = handler.server
        join = (asked.seen[-1][3] or {}).get("method") == "lit_rl_join"
        (behaviour if join else routed(ANSWERS))(handler)

    with standing_in(behave) as server:
        client = Client(server.url)
        engine = ServerEngine([client], Gloo([client], 1.0), say=str, deadline=5.0, answer_deadline=1.0)
        with pytest.raises((GenerationError, EngineLost), match=said) as refusal:
            engine.begin({"w": (1,)})
            engine.load(iter([("w", torch.zeros(1))]), torch.float32)
    message = str(refusal.value)
    assert server.url in message and message.isprintable() and len(message) < 1000


def test_a_server_that_comes_up_later_is_waited_for_and_one_that_does_not_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries, real = list[float](), launch.time.sleep
    monkeypatch.setattr(launch, "_RETRY_SECONDS", 0.2)
    with socket.socket() as free, socket.socket() as away:
        free.bind(("127.0.0.1", 0))
        away.bind(("127.0.0.1", 0))
        port, nobody = free.getsockname()[1], f"http://127.0.0.1:{away.getsockname()[1]}"
        late = f"http://127.0.0.1:{port}"
        with pytest.raises(ServerDead, match="refused"):
            wait_for_servers([late, nobody], 0.5, 1.0)
        with ExitStack() as servers:

            def sleep(seconds: float) -> None:
                tries.append(seconds)
                if len(tries) == 2:
                    free.close()
                    servers.enter_context(standing_in(routed(ANSWERS), port))
                real(seconds)

            monkeypatch.setattr(launch.time, "sleep", sleep)
            assert wait_for_servers([late, nobody], 30.0, 1.0) == responsive_servers([late, nobody], 1.0) == [late]
            assert len(tries) == 2


def test_a_server_to_which_there_is_no_way_is_named() -> None:
    with pytest.raises(GenerationError, match=r"no-such-host\.invalid.* no way of its own"):
        own_address("http://no-such-host.invalid:8000")


# ---------------------------------------------------------------------- any value of any answer

READERS: dict[str, tuple[Any, Callable[[JSONValue], Any]]] = {
    "models": (MODELS, answers.parse_models),
    "workers": ({"world_size": 2}, answers.parse_world_size),
    "results": ({"results": [None]}, answers.parse_results),
    "reset": ({"success": True}, answers.parse_reset),
    "facts": (FACTS, answers.parse_facts),
    "completions": (COMPLETIONS, lambda came: answers.parse_completions(came, PLAIN, VOCABULARY)),
    "drawn": (DRAWN, lambda came: (answers.parse_prompt(came), answers.parse_generated(came, SEEN, VOCABULARY))),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3),
    max_leaves=5,
)


def places(value: Any, *before: str | int) -> Iterator[tuple[str | int, ...]]:
    """Paths of all values."""
    yield before
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, each in inside:
        yield from places(each, *before, step)


def answered(value: Any) -> JSONValue:
    return JSONValue(value, lambda what: Client("http://here:1")._unexpected("POST /x", what))


def read(name: str, value: Any) -> Any:
    """What is made of an answer as it travels, or None where it is refused."""
    try:
        return READERS[name][1](answered(json.loads(json.dumps(value))))
    except GenerationError as error:
        assert str(error).startswith("http://here:1: POST /x: ") and str(error).isprintable()
        return None


@pytest.mark.parametrize("name", ["workers", "reset", "completions", "drawn"])
def test_a_value_of_another_kind_changes_nothing_or_is_refused(name: str) -> None:
    """Null, a list, a text, an object and a huge number in the place of each value."""
    good = READERS[name][0]
    result = repr(read(name, good))
    for path in places(good):
        for other in (None, [], ["x"], "x\x1b", {}, 10**30, -(10**30), 1e300, math.nan):
            if path[-1:] != ("prompt_token_ids",) and path[:1] != ("prompt_token_ids",):  # compared with the request's
                assert repr(read(name, changed(good, *path, to=other))) in (result, "None"), (path, other)


@given(st.data())
def test_nothing_that_is_answered_ends_in_another_error(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(READERS)))
    good = READERS[name][0]
    path = data.draw(st.sampled_from(list(places(good))))
    read(name, changed(good, *path, to=data.draw(JSON)))


def test_the_log_prob_is_the_sampled_token_s_and_not_the_likeliest_one_s():
    """Of two candidates a place the server names the sampled one second."""
    listed, drawn = copy.deepcopy(COMPLETIONS), copy.deepcopy(DRAWN)
    for choice in listed["choices"]:
        own = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"])
        choice["logprobs"]["top_logprobs"] = [{"token_id:3": -0.01, f"token_id:{token}": value} for token, value in own]
    for choice in drawn["choices"]:
        for entry in choice["logprobs"]["content"]:
            entry["top_logprobs"] = [{"token_id": 3, "logprob": -0.01}, dict(entry)]
    plain = answers.parse_completions(answered(listed), PLAIN, VOCABULARY)
    seen = answers.parse_generated(answered(drawn), SEEN, VOCABULARY)
    assert [answer.logprobs for answer in plain] == [[-0.125, -1e-7, 1e-6], [-0.25, 0]]
    assert [answer.logprobs[0] for answer in seen] == [-0.25, -0.25]
    likely, second = SimpleNamespace(logprob=-0.01), SimpleNamespace(logprob=-4.0)
    one = SimpleNamespace(token_ids=[8], logprobs=[{3: likely, 8: second}], finish_reason="stop")
    assert read_output(SimpleNamespace(prompt_logprobs=None), one).logprobs == [-4.0]
