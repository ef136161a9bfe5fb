"""HTTP requests whose answers are not trusted: no redirect is followed, no proxy is asked for servers of this machine,
and an answer is read up to a deadline and a size. Standard library only.
"""

from __future__ import annotations

import http.client
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from lit_rl.core.machine import is_loopback

_PIECE = 2**20


class AnswerTooLarge(Exception):
    """An answer with more bytes than are read; `start` has the first of them."""

    def __init__(self, start: bytes) -> None:
        super().__init__("the answer is too large")
        self.start = start


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that follows no redirect: one would turn a POST into a GET, and send the key to another server."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


def opener_for(url: str, *handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """Return an opener for the addresses of one server. A server of this machine is reached without the proxies of the
    environment.

    Args:
        url: An address of the server.
        handlers: Further handlers, in place of those of urllib for the same protocols.
    """
    direct = [urllib.request.ProxyHandler({})] if is_loopback(urlsplit(url).hostname) else []
    return urllib.request.build_opener(NoRedirect, *handlers, *direct)


def read_answer(response: http.client.HTTPResponse, *, largest: int, until: float) -> bytes:
    """Read an answer to its end.

    Args:
        response: The answer, whose head has been read.
        largest: Bytes that it may have.
        until: Deadline, by `time.monotonic`.

    Raises:
        AnswerTooLarge: it has more bytes.
        TimeoutError: it was not read to its end by the deadline.
        http.client.IncompleteRead: the connection ended before the answer did.
    """
    answer = bytearray()
    while piece := response.read1(_PIECE):
        answer += piece
        if time.monotonic() > until:
            raise TimeoutError("the answer was not complete by the deadline")
        if len(answer) > largest:
            raise AnswerTooLarge(bytes(answer[:999]))
    if response.length:  # `read1` takes the end of the connection for the end of the answer
        raise http.client.IncompleteRead(b"", response.length)
    return bytes(answer)
