"""The client of a vLLM server, against a stand-in that hangs, refuses, dies, or talks nonsense."""

from __future__ import annotations

import socket
import time

import pytest
from standin_server import answers, breaks_off, drips, hangs, standing_in

from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.http_client import HTTP_LOOP
from lit_rl.generation.vllm import client as calls
from lit_rl.generation.vllm.client import Client, ServerDead, ServerError, ServerHung, ServerRefused

wait = HTTP_LOOP.wait

NEAR = {"data": [{"id": "near"}]}


@pytest.mark.parametrize("behaviour", [hangs(), drips], ids=["silent", "dripping"])
def test_a_server_that_hangs_is_noticed_at_the_deadline(behaviour):
    with standing_in(behaviour) as server:
        began = time.monotonic()
        with pytest.raises(ServerHung, match=r"within 0.3 seconds") as hung:
            wait(Client(server.url).complete({"prompt": [[1]]}, 0.3))
        assert 0.25 < time.monotonic() - began < 0.9
        assert hung.value.url == server.url and hung.value.exit_code == 5


def test_no_call_is_made_where_no_time_is_left():
    with standing_in(answers({})) as server:
        with pytest.raises(ServerHung, match="no time"):
            wait(Client(server.url).health(0.0))
        assert server.seen == []


def test_a_server_that_is_not_there_or_breaks_off_is_dead():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ServerDead, match="refused"):
        wait(Client(url).health(1.0))
    with pytest.raises(ServerDead):
        wait(Client("http://no-such-host.invalid").health(1.0))
    with standing_in(breaks_off) as server, pytest.raises(ServerDead):
        wait(Client(server.url).complete({}, 1.0))


def test_an_engine_that_died_behind_its_server_is_dead():
    with standing_in(answers("", 503)) as server, pytest.raises(ServerDead, match="engine has died"):
        wait(Client(server.url).health(1.0))
    message = {"error": {"message": "EngineCore encountered an issue. See stack trace", "code": 500}}
    with standing_in(answers(message, 500)) as server, pytest.raises(ServerDead, match="engine has died"):
        wait(Client(server.url).complete({}, 1.0))


@pytest.mark.parametrize(
    "said",
    [
        {"error": {"message": "Server shutting down.", "code": 500}},
        {"error": "Failed to pause generation: cannot schedule new futures after shutdown"},
    ],
)
def test_a_server_that_is_stopping_is_dead(said):
    with standing_in(answers(said, 500)) as server, pytest.raises(ServerDead, match="shutting down"):
        wait(Client(server.url).pause(1.0))


def test_an_answer_without_end_is_not_read_to_it(monkeypatch):
    monkeypatch.setattr(calls, "LARGEST_ANSWER", 2**20)
    with standing_in(answers("x" * 2**22, 200)) as server, pytest.raises(ServerRefused, match="no answer of a vLLM"):
        wait(Client(server.url).complete({}, 5.0))


@pytest.mark.parametrize(
    "body, said",
    [
        ({"error": {"message": "no\n  such\x1b[2J model", "code": 400}}, r"no such\?\[2J model"),
        ({"error": "no such model"}, "no such model"),
        ({"detail": "no such model"}, "no such model"),
        ("no such model", "no such model"),
    ],
    ids=["nested", "flat", "detail", "text"],
)
def test_a_refusal_carries_the_servers_words(body, said):
    with standing_in(answers(body, 400)) as server, pytest.raises(ServerRefused, match=said) as refused:
        wait(Client(server.url).complete({}, 1.0))
    assert refused.value.status == 400 and "POST /v1/completions" in str(refused.value)
    assert isinstance(refused.value, ServerError) and isinstance(refused.value, GenerationError)


def test_what_is_missing_is_advised():
    with standing_in(answers({"error": "Unauthorized"}, 401)) as server, pytest.raises(ServerRefused) as refused:
        wait(Client(server.url).models(1.0))
    assert "VLLM_API_KEY" in str(refused.value)
    with standing_in(answers({"detail": "Not Found"}, 404)) as server, pytest.raises(ServerRefused) as refused:
        wait(Client(server.url).pause(1.0))
    assert "lit-rl serve" in str(refused.value)


@pytest.mark.parametrize(
    "body, shown", [("<html>\x1b", r"<html>\\u001b"), ("[" * 10**5, r"\[\[")], ids=["html", "deeper_than_python_counts"]
)
def test_an_answer_that_is_no_json_is_refused(body, shown):
    with standing_in(answers(body)) as server, pytest.raises(ServerRefused, match=f'no answer of a vLLM.*"{shown}'):
        wait(Client(server.url).complete({}, 1.0))


def test_a_refusal_without_sense_is_one_too():
    def behave(handler):
        handler.send_response(500, "no\x1b[2Jreason")
        handler.send_header("Content-Length", str(10**4))
        handler.end_headers()
        handler.wfile.write(b"[" * 10**4)

    with standing_in(behave) as server, pytest.raises(ServerRefused, match=r"HTTP 500 no\?\[2Jreason: \[\["):
        wait(Client(server.url).complete({}, 1.0))


def test_a_redirect_is_not_followed():
    def elsewhere(handler):
        handler.send_response(302)
        handler.send_header("Location", "/v1/models")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with standing_in(elsewhere) as server:
        with pytest.raises(ServerRefused, match="302"):
            wait(Client(server.url).pause(1.0))
        assert len(server.seen) == 1


def test_the_key_comes_from_the_environment_alone(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with standing_in(answers(NEAR)) as server:
        client = Client(server.url)
        wait(client.models(1.0))
        monkeypatch.setenv("VLLM_API_KEY", "secret")
        wait(client.models(1.0))
        sent = [headers.get("Authorization") for _, _, headers, _ in server.seen]
    assert sent == [None, "Bearer secret"]


def test_a_proxy_of_the_environment_is_for_other_machines_only(monkeypatch):
    with standing_in(answers(NEAR)) as server, standing_in(answers({"data": [{"id": "far"}]})) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert wait(Client(server.url).models(1.0)) == {"near": None}
        assert proxy.seen == []
        assert wait(Client("http://far.invalid:8000").models(1.0)) == {"far": None}


def test_an_rpc_gives_the_result_of_every_worker():
    with standing_in(answers({"results": [{"version": 3}, None]})) as server:
        assert wait(Client(server.url).rpc("facts", [1], {"a": 2}, deadline=2.0)) == [{"version": 3}, None]
        ((verb, path, _, body),) = server.seen
    assert (verb, path) == ("POST", "/collective_rpc")
    assert body == {"method": "facts", "args": [1], "kwargs": {"a": 2}, "timeout": 2.0}


def test_caches_are_reset_when_they_are_all_reset():
    replies = iter([{"success": False}, {"success": True}, {}, {}])
    with standing_in(lambda handler: answers(next(replies))(handler)) as server:
        wait(Client(server.url).reset_caches(2.0))
        paths = [path for _, path, _, _ in server.seen]
    assert paths == ["/reset_prefix_cache", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"]
    with standing_in(answers({"success": False})) as server, pytest.raises(ServerRefused, match="prefix cache"):
        wait(Client(server.url).reset_caches(0.4))


def test_query_parameters_reach_the_route():
    with standing_in(answers({})) as server:
        client = Client(server.url)
        wait(client.pause(1.0, mode="keep"))
        wait(client.post("/wake_up", 1.0, tags=["weights", "kv_cache"]))
        wait(client.post("/wake_up", 1.0, tags=[]))
        paths = [path for _, path, _, _ in server.seen]
    assert paths == ["/pause?mode=keep", "/wake_up?tags=weights&tags=kv_cache", "/wake_up"]


def test_an_address_with_a_password_is_refused_without_a_word_of_it():
    with pytest.raises(ConfigError, match=r"generator\.urls.*VLLM_API_KEY") as refusal:
        Client("http://me:secret@host:8000")
    assert "secret" not in str(refusal.value)


def test_a_slash_at_the_end_means_nothing():
    assert Client("http://127.0.0.1:8000/").url == "http://127.0.0.1:8000"
