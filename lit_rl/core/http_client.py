"""The one HTTP client, for servers whose answers are not trusted: requests, how they are sent again, and their JSON.

Requests run on `HTTP_LOOP`, an event loop in a thread of its own. A user's coroutine that blocks its own loop delays no
deadline here, and a thread that waits in `HTTP_LOOP.wait` can be interrupted by a signal. A cancelled request closes
its connection, at which vLLM drops the request too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import socket
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Generic, NoReturn, TypeVar
from urllib.parse import urlsplit

import aiohttp
import yarl

from lit_rl.core import ranks
from lit_rl.core.errors import ConfigError
from lit_rl.core.event_loops import BackgroundLoop
from lit_rl.core.machine import is_loopback

HTTP_LOOP = BackgroundLoop("lit_rl-http")
"""The loop of requests."""


class NoAnswer(Exception):
    """A request that no server has answered: none listens there, or the connection broke."""


class LateAnswer(NoAnswer):
    """A request whose answer was not complete by its deadline."""


class LargeAnswer(NoAnswer):
    """An answer with more bytes than are read; `start` has the first of them."""

    def __init__(self, largest: int, start: bytes) -> None:
        super().__init__(f"the answer is larger than {largest} bytes")
        self.start = start


@dataclass(frozen=True)
class HTTPAnswer:
    """A complete answer, of any status."""

    status: int
    reason: str
    body: bytes
    retry_after: float | None = None
    """Seconds that the server asks to be left alone, by its header Retry-After; None where it says nothing."""

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300


async def request(
    verb: str, url: str, body: bytes | None = None, *, bearer: str | None, timeout: float, largest: int
) -> HTTPAnswer:
    """Send one request, whose body is JSON, and read the answer to its end.

    No redirect is followed: it would turn a POST into a GET, and send the key to another server. Proxies of the
    environment are used, but not for a server of this machine. Each request has a connection of its own, so that none
    fails because a server has closed an idle one.

    Args:
        verb: GET or POST.
        url: Full address, encoded.
        body: JSON; None sends none.
        bearer: The key that is sent; None or an empty one sends none.
        timeout: Seconds until the answer has to be complete.
        largest: Bytes that the answer may have.

    Raises:
        NoAnswer: also as `LateAnswer` or `LargeAnswer`.
    """
    headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
    if bearer:
        headers["Authorization"] = f"Bearer {bearer}"
    try:
        async with (
            asyncio.timeout(timeout),
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(),
                auto_decompress=False,
            ) as session,
            session.request(
                verb,
                yarl.URL(url, encoded=True),
                data=body,
                headers=headers,
                allow_redirects=False,
                proxy=_proxy_for(url),
            ) as response,
        ):
            answer = bytearray()
            async for piece in response.content.iter_any():
                answer += piece
                if len(answer) > largest:
                    raise LargeAnswer(largest, bytes(answer[:999]))
            pause = seconds_until(response.headers.get("Retry-After", ""))
            return HTTPAnswer(response.status, response.reason or "", bytes(answer), pause)
    except TimeoutError as error:
        raise LateAnswer(f"no answer within {timeout:g} seconds") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NoAnswer(_reason(error)) from error


def seconds_until(header: str) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date (RFC 9110, 10.2.3); None if it is neither."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _proxy_for(url: str) -> str | None:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(parts.scheme)


def _reason(error: Exception) -> str:
    """Return the system's words for a failed connection, or the error's own."""
    cause = getattr(error, "os_error", error)
    if isinstance(cause, OSError) and cause.errno and not isinstance(cause, socket.gaierror):
        return os.strerror(cause.errno)
    return str(cause) or type(cause).__name__


# ------------------------------------------------------------------ addresses and tokens


def check_address(key: str, url: str, *, allow_http: bool, token_key: str) -> None:
    """Refuse an address that is none, holds a password, or would send texts unencrypted over a network.

    Args:
        key: The setting that has the address, for messages.
        url: The address.
        allow_http: Whether http:// to another machine is allowed.
        token_key: The setting for a token, for messages.

    Raises:
        ConfigError: names the setting.
    """
    parts = urlsplit(str(url))
    shown = str(url).replace(f"{parts.username}:{parts.password}@", "***@") if parts.password else url
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key}: {shown!r} is no address of a server: it reads https://host:port/path.")
    if parts.username or parts.password:
        raise ConfigError(
            f"{key}: {shown!r} holds a user name: put a token into an environment variable, {token_key}=NAME."
        )
    if parts.scheme == "http" and not allow_http and not is_loopback(parts.hostname):
        raise ConfigError(
            f"{key}: {shown!r} would send prompts and completions unencrypted over the network. Use https, or say "
            "that this network is yours: allow_http=true."
        )


def check_token(key: str, variable: str | None) -> None:
    """Refuse the name of an environment variable that is not set.

    Args:
        key: The setting that has the name, for messages.
        variable: The name. None: no token is sent.

    Raises:
        ConfigError: names the setting.
    """
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"{key}={variable!r}: there is no environment variable of this name. Set it first.")


# ------------------------------------------------------------------ requests that are sent again

Result = TypeVar("Result")

_LONGEST_WAIT = 30.0
_RETRIED_STATUSES = (408, 409, 425, 429)
"""Statuses of the 400s that the same request may not get again: too slow, in conflict, too early, too many."""


class RequestFailed(Exception):
    """A request without the requested result.

    Args:
        why: The reason, in words.
        status: Of the answer; None where there was none, or one that cannot be read.
        retry_after: Seconds that the server asks to be left alone; None where it says nothing.
    """

    def __init__(self, why: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(why)
        self.status, self.retry_after = status, retry_after

    @property
    def for_good(self) -> bool:
        """True if the same request would be answered the same again: a status of the 400s that does not pass."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in _RETRIED_STATUSES


async def fetch(
    verb: str, url: str, body: bytes | None, *, token_env: str | None, timeout: float, largest: int, quoted: int
) -> bytes:
    """Return the body of a successful answer.

    Args:
        verb: The method, such as POST.
        url: The address.
        body: What is sent; None sends nothing.
        token_env: The environment variable whose value is sent as a bearer token. None sends none.
        timeout: Seconds until the answer is complete.
        largest: Most bytes of an answer.
        quoted: Most bytes of a refusal that the error quotes.

    Raises:
        RequestFailed: the server cannot be reached, refuses, or answers too late or too much.
    """
    bearer = os.environ.get(token_env, "").strip() if token_env is not None else None
    try:
        answer = await request(verb, url, body, bearer=bearer, timeout=timeout, largest=largest)
    except NoAnswer as error:
        raise RequestFailed(str(error)) from error
    if not answer.is_ok:
        words = plain_line(answer.body[:quoted].decode(errors="replace"))
        raise RequestFailed(
            f"answered {answer.status} {plain_line(answer.reason)} {words}",
            status=answer.status,
            retry_after=answer.retry_after,
        )
    return answer.body


async def back_off(failures: int, first: float, at_least: float = 0.0) -> None:
    """Wait after a failure: `first` seconds, doubled every time up to 30, and shortened by up to half at random.

    Never shorter than `at_least` seconds.
    """
    await asyncio.sleep(wait_after(failures, first, at_least))


def wait_after(failures: int, first: float, at_least: float = 0.0) -> float:
    """Return the seconds that `back_off` waits."""
    doubled = first * 2 ** min(failures - 1, 60)  # beyond 2^1023 it would be no float
    return max(at_least, min(_LONGEST_WAIT, doubled) * random.uniform(0.5, 1))


@dataclass(frozen=True)
class Sent(Generic[Result]):
    """The outcome of one request of a `PatientSender`: a result or a fault, and what it took."""

    result: Result | None
    fault: RequestFailed | None
    """The last failure, where there is no result."""
    requests: int
    """Times that it was sent."""
    waited: float
    """Seconds that the server's limit on its rate was waited for."""


class PatientSender:
    """Requests to one server, each sent until it is answered. For one event loop.

    A request that fails is sent again after a wait (`wait_after`), unless the server refuses it for good. A server that
    asks to be left alone (a status of 429 or 503 with Retry-After) is not sent any request by this process until then.

    Args:
        concurrency: Requests under way at once, over all processes of a run: each has its share, at least one.
        attempts: Times that a request is sent before it counts as failed.
        backoff: Seconds of the first wait after a failure.
        patience: Seconds from the first time that the server asks to be left alone in which a request may wait for it;
            this uses up no attempt.
    """

    def __init__(self, concurrency: int, attempts: int, backoff: float, patience: float) -> None:
        self.concurrency, self.attempts, self.backoff, self.patience = concurrency, attempts, backoff, patience
        self._free: asyncio.Semaphore | None = None
        self._held_until = 0.0

    async def send(self, call: Callable[[], Awaitable[Result]]) -> Sent[Result]:
        """Return the result of `call`, which sends the request and raises `RequestFailed` where it fails."""
        if self._free is None:
            self._free = asyncio.Semaphore(max(1, self.concurrency // ranks.world_size()))
        sent = failures = refusals = 0
        waited, first_refusal = 0.0, math.inf
        while True:
            try:
                async with self._free:
                    waited += await self._while_held()
                    sent += 1
                    return Sent(await call(), None, sent, waited)
            except RequestFailed as error:
                fault = error
            if fault.retry_after is not None and fault.status in (429, 503):
                now = time.monotonic()
                first_refusal, refusals = min(first_refusal, now), refusals + 1
                pause = wait_after(refusals, self.backoff, fault.retry_after)  # it may say 0, or a time that is past
                if now - first_refusal + pause > self.patience:
                    return Sent(None, fault, sent, waited)
                self._held_until = max(self._held_until, now + pause)
                if pause:
                    continue
            failures += 1
            if fault.for_good or failures >= self.attempts:
                return Sent(None, fault, sent, waited)
            await back_off(failures, self.backoff)

    async def _while_held(self) -> float:
        """Wait as long as the server has asked to be left alone; return the seconds."""
        began, held = time.monotonic(), False
        while (left := self._held_until - time.monotonic()) > 0:
            held = True
            await asyncio.sleep(left)
        return time.monotonic() - began if held else 0.0


# ------------------------------------------------------------------ JSON

_EXCERPT = 200
"""Letters of an answer in a message."""

_MOST = 2**31 - 1

_LONGEST_WORD = 1000
"""Letters of a name: they stand in messages."""


@dataclass(frozen=True)
class JSONValue:
    """A value in an answer, its place there, and the checks of its type.

    Any program may listen at an address, so each value is checked where it is read; what nobody reads may be anything.
    """

    value: Any
    fault: Callable[[str], Exception]
    """Makes the error for an invalid answer from a clause that says what is wrong with it."""
    place: str = "it"

    @staticmethod
    def parse(answer: bytes, fault: Callable[[str], Exception]) -> JSONValue:
        """Return the value of a body; raise `fault` where it is no JSON."""
        try:
            return JSONValue(json.loads(answer), fault)
        except (ValueError, RecursionError) as error:  # no UTF-8 is a ValueError; the other, nested too deeply
            raise fault(f"{json_excerpt(answer)} is no JSON") from error

    def refuse(self, wanted: str) -> NoReturn:
        raise self.fault(f"{self.place} is {json_excerpt(self.value)}, and has to be {wanted}")

    def part(self, name: str) -> JSONValue:
        """Return the part of an object under a name, which has to exist."""
        if not isinstance(self.value, dict) or name not in self.value:
            self.refuse(f'an object with "{name}"')
        return JSONValue(self.value[name], self.fault, name if self.place == "it" else f"{self.place}.{name}")

    def entry(self, index: int) -> JSONValue:
        if not isinstance(self.value, list) or index >= len(self.value):
            self.refuse(f"a list of {index + 1} or more")
        return JSONValue(self.value[index], self.fault, f"{self.place}[{index}]")

    def entries(self) -> Iterator[JSONValue]:
        return (self.entry(index) for index in range(len(self.as_list())))

    def as_list(self, length: int | None = None, of: str = "one for each") -> list[Any]:
        """Return a list, of this many entries; `of` says for what."""
        if not isinstance(self.value, list):
            self.refuse("a list")
        if length is not None and len(self.value) != length:
            self.refuse(f"a list of {length}, {of}, not of {len(self.value)}")
        return self.value

    def whole(self, low: int = 1, high: int = _MOST) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            self.refuse(f"a whole number from {low} to {high}")
        return self.value

    def whole_or_null(self, low: int = 1, high: int = _MOST) -> int | None:
        return None if self.value is None else self.whole(low, high)

    def finite_or_null(self) -> float | None:
        is_number = type(self.value) in (int, float)
        if self.value is not None and not (is_number and abs(self.value) <= sys.float_info.max):
            self.refuse("a finite number, or null")
        return self.value

    def word(self) -> str:
        if not isinstance(self.value, str) or not self.value.isprintable() or not 0 < len(self.value) <= _LONGEST_WORD:
            self.refuse("a name in printable letters")
        return self.value


_LARGEST_JSON = 64 * 2**20


async def fetch_json(verb: str, url: str, body: bytes | None, *, token_env: str | None, timeout: float) -> JSONValue:
    """Return the JSON of a successful answer of at most 64 MB, for the arguments of `fetch`.

    Raises:
        RequestFailed: the server cannot be reached, refuses, or answers too late, too much or no JSON.
    """
    answer = await fetch(verb, url, body, token_env=token_env, timeout=timeout, largest=_LARGEST_JSON, quoted=200)
    return JSONValue.parse(answer, lambda what: RequestFailed(f"the answer is wrong: {what}"))


def json_excerpt(value: Any) -> str:
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
    if isinstance(value, Mapping):
        first = itertools.islice(value.items(), 9)
        return {name[:_EXCERPT]: _beginning(each, depth - 1) for name, each in first} if depth else {"...": "..."}
    return value


def plain_line(text: str, longest: int = 600) -> str:
    """Return one line of printable characters."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in words)[:longest]
