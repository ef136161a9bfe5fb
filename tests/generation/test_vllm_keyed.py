"""Every route of a server that has a key asks for it; the real server is asked in tests/engines/test_serve.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lit_rl.generation.vllm.engine_settings import API_KEY_VARIABLE, APIKeyMiddleware
from lit_rl.generation.vllm.launch import server_arguments

RIGHT = (b"authorization", b"Bearer of this test")


def asked(path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> list[dict[str, Any]]:
    """What comes back, of an app that answers everything with 200."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(APIKeyMiddleware(app)({"type": kind, "path": path, "headers": list(headers)}, None, send))
    return sent


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, " of this test\n")


@pytest.mark.parametrize("path", ["/collective_rpc", "/v1/completions", "/pause", "/health/../collective_rpc", ""])
def test_without_the_key_nothing_is_reached(path: str) -> None:
    wrong = [(), ((b"authorization", b"of this test"),), ((b"authorization", b"Bearer of this tes"),), (RIGHT, RIGHT)]
    for headers in wrong:
        start, body = asked(path, *headers)
        assert (
            start["status"] == 401 and API_KEY_VARIABLE.encode() in body["body"] and b"of this test" not in body["body"]
        )
        assert asked(path, *headers, kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert asked(path, RIGHT)[0]["status"] == asked(path, (b"Authorization", RIGHT[1]))[0]["status"] == 200


def test_whether_it_is_there_is_no_secret() -> None:
    assert asked("/health")[0]["status"] == 200
    asked("", kind="lifespan")


def test_a_server_gets_it_where_there_is_a_key_and_no_server_is_keyed_with_nothing(monkeypatch) -> None:
    flag = "--middleware=lit_rl.generation.vllm.engine_settings.APIKeyMiddleware"
    assert flag in server_arguments({}, name="m", host="h", port=1)
    monkeypatch.setenv(API_KEY_VARIABLE, " ")
    assert flag not in server_arguments({}, name="m", host="h", port=1)
    with pytest.raises(RuntimeError, match=API_KEY_VARIABLE):
        asked("/")
