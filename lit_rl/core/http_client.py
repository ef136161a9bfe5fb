"""The one HTTP client, for servers whose answers are not trusted, and the check of their JSON.

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
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aiohttp
import yarl

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
