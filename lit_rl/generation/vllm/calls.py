"""JSON over HTTP with a deadline, and the three failures of a call to a server."""

from __future__ import annotations

import http.client
import itertools
import json
import time
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit

from lit_rl.errors import ConfigError, GenerationError
from lit_rl.generation.vllm import keyed
from lit_rl.generation.vllm.connections import Connections
from lit_rl.loopback import is_loopback

_LONGEST_MESSAGE = 600
LARGEST_ANSWER = 2**28
"""Bytes: a completion of a million tokens with its log-probs has less."""
_DEAD = ("EngineDeadError", "EngineCore encountered")
_ENDING = ("Server shutting down", "after shutdown")  # the second is Python's, of a pool that takes no more work
_EXCERPT = 200
"""Letters of an answer in a message."""


class ServerError(GenerationError):
    """A failed call to a server; `url` is the server's."""

    def __init__(self, url: str, call: str, why: str) -> None:
        super().__init__(f"{url}: {call}: {why}")
        self.url = url
        self.why = why


class ServerDead(ServerError):
    """A server that does not listen, a broken connection, or an engine that has died."""


class ServerHung(ServerError):
    """An answer that did not come within the deadline."""


class ServerRefused(ServerError):
    """An answer of the server other than the requested one.

    `status` is HTTP's; 200 where the answer is invalid.
    """

    def __init__(self, url: str, call: str, why: str, status: int) -> None:
        super().__init__(url, call, why)
        self.status = status


class JSONCalls:
    """Calls of one server. Holds no connection, so threads may share it.

    A bearer key is read from the environment variable VLLM_API_KEY, as the server does, and from nowhere else. Proxies
    of the environment are used, but never for this machine. vLLM drops an aborted request too, since its connection
    closes.

    Args:
        url: Base address of the server, such as ``http://127.0.0.1:8000``.
        key: Name of the setting with the address, for messages.

    Raises:
        ConfigError: no http:// or https:// address of a server, or one with a user name, a path or a query.
    """

    def __init__(self, url: str, key: str = "generator.urls") -> None:
        self.url = checked_url(url, key)
        self._connections = Connections()
        handlers: list[Any] = [_NoRedirect, *self._connections.handlers()]
        if is_loopback(urlsplit(self.url).hostname):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def hang_up(self) -> None:
        """End the calls that other threads wait for, as `ServerDead`, and every later one."""
        self._connections.cut()

    def get(self, route: str, deadline: float, **query: Any) -> Any:
        """Return the JSON of an answer; None where it is empty.

        Args:
            route: Path of the server, from ``/``.
            deadline: Seconds.
            query: Query parameters; a list is repeated.

        Raises:
            ServerError: one of its three kinds.
        """
        return self._call("GET", route, deadline, None, query)

    def post(self, route: str, deadline: float, body: Mapping[str, Any] | None = None, **query: Any) -> Any:
        """Return the JSON of an answer to a JSON body, like `get`."""
        return self._call("POST", route, deadline, body, query)

    def _call(self, verb: str, route: str, deadline: float, body: Mapping[str, Any] | None, query: Any) -> Any:
        call, until = f"{verb} {route}", time.monotonic() + deadline
        if deadline <= 0:
            raise ServerHung(self.url, call, "no time was left for it.")
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if secret := keyed.key():
            headers["Authorization"] = f"Bearer {secret}"
        asked = urlencode(query, doseq=True)
        address = f"{self.url}{route}?{asked}" if asked else f"{self.url}{route}"
        data = None if body is None and verb == "GET" else json.dumps(body or {}, allow_nan=False).encode()
        request = urllib.request.Request(address, data, headers, method=verb)
        try:
            with self._opener.open(request, timeout=deadline) as response:
                answer = self._whole(response, call, until)
        except HTTPError as error:
            with error:
                raise self._refused(call, error) from error
        except (OSError, http.client.HTTPException) as error:
            reason: Any = error.reason if isinstance(error, URLError) else error
            if isinstance(reason, TimeoutError):
                raise ServerHung(self.url, call, f"no answer within {deadline:g} seconds.") from error
            said = str(reason) or type(reason).__name__
            raise ServerDead(self.url, call, f"no server answers there: {said}.") from error
        if not answer:
            return None
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            if route.startswith("/v1/") and "lora_adapter" in route:  # these two answer in words
                return None
            raise nonsense(self.url, call, f"{excerpt(answer)} is no JSON") from error

    def _whole(self, response: http.client.HTTPResponse, call: str, until: float) -> bytes:
        answer = bytearray()
        while piece := response.read1(2**20):
            answer += piece
            if time.monotonic() > until:
                raise TimeoutError
            if len(answer) > LARGEST_ANSWER:
                start = excerpt(bytes(answer[:999]))
                raise nonsense(self.url, call, f"it is longer than {LARGEST_ANSWER} bytes: {start}")
        if response.length:  # `read1` takes the end of the connection for the end of the answer
            raise http.client.IncompleteRead(b"", response.length)
        return bytes(answer)

    def _refused(self, call: str, error: HTTPError) -> ServerError:
        try:
            said = _message(error.read(2**16))
        except (OSError, http.client.HTTPException):
            said = ""
        if any(words in said for words in _DEAD):
            return ServerDead(self.url, call, f"its engine has died: {said}")
        if any(words in said for words in _ENDING):
            return ServerDead(self.url, call, "it is shutting down")
        advice = ""
        if error.code == 401:
            advice = f" The server wants a key: set the environment variable {keyed.KEY}."
        elif error.code == 404 and not call.partition(" ")[2].startswith("/v1/"):
            advice = (
                " The server lacks the routes of training: start it with `lit-rl serve`, or VLLM_SERVER_DEV_MODE=1."
            )
        return ServerRefused(
            self.url, call, f"HTTP {error.code} {_plain(str(error.reason))}: {said.rstrip('.')}.{advice}", error.code
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that follows no redirect: one would turn a POST into a GET, and send the key to another server."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


def checked_url(url: str, key: str) -> str:
    """Return the base address without a slash at its end. Raise a ConfigError for an invalid one; see `Client`."""
    try:
        parts = urlsplit(str(url))
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"{key}: {url!r} is no address of a server: {error}.") from error
    if parts.username or parts.password:
        raise ConfigError(
            f"{key} holds a user name or a password: put a key into the environment variable {keyed.KEY}."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key}: {url!r} is no address of a server: it reads http://host:port.")
    if parts.path.rstrip("/") or parts.query or parts.fragment:
        raise ConfigError(f"{key}: {url!r} has more than a host and a port: leave out what follows them, such as /v1.")
    return f"{parts.scheme}://{parts.netloc}"


def nonsense(url: str, call: str, what: str) -> ServerRefused:
    """Return the error for an invalid answer.

    Args:
        url: The server's address.
        call: The call.
        what: The fault of the answer; a sentence without its full stop.
    """
    return ServerRefused(
        url,
        call,
        f"this is no answer of a vLLM server of ours: {what}. Another program listens at this address, or the server "
        "runs another version of vLLM or of lit_rl than the trainer: start it by `lit-rl serve` with the trainer's.",
        200,
    )


def excerpt(value: Any) -> str:
    """Return the beginning of a value as JSON: one line of ASCII, control characters escaped."""
    shown = json.dumps(_beginning(value, depth=4))
    return shown if len(shown) <= _EXCERPT else f"{shown[:_EXCERPT]} ..."


def _beginning(value: Any, depth: int) -> Any:
    """Return a part that is small enough to be written: an answer may be long, and deeper than Python's recursion
    limit."""
    if isinstance(value, bytes):
        value = value[: 4 * _EXCERPT].decode(errors="replace")
    if isinstance(value, str):
        return value[:_EXCERPT]
    if isinstance(value, list):
        return [_beginning(each, depth - 1) for each in value[:9]] if depth else ["..."]
    if isinstance(value, dict):
        first = itertools.islice(value.items(), 9)
        return {name[:_EXCERPT]: _beginning(each, depth - 1) for name, each in first} if depth else {"...": "..."}
    return value


def _message(body: bytes) -> str:
    """Return the message of an error's body: vLLM writes JSON of several shapes."""
    text = body.decode(errors="replace")
    try:
        found: Any = json.loads(text)
        for name in ("error", "message", "detail"):
            while isinstance(found, dict) and name in found:
                found = found[name]
        return _plain(found if isinstance(found, str) else json.dumps(found))
    except (ValueError, RecursionError):
        return _plain(text)


def _plain(text: str) -> str:
    """Return one line of printable characters."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in words)[:_LONGEST_MESSAGE]
