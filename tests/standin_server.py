"""A stand-in for a vLLM server: answers what a test tells it to, or nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Notes every request, and behaves as its server was told."""

    asked: Any = None
    """The body of the request; None where it has none."""

    def do_GET(self) -> None:
        self._do()

    def do_POST(self) -> None:
        self._do()

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server: Any = self.server
        self.asked = json.loads(body) if body else None
        server.seen.append((self.command, self.path, dict(self.headers), self.asked))
        server.behaviour(self)

    def log_message(self, format: str, *args: Any) -> None:
        """No lines on stderr."""


class StandIn(ThreadingHTTPServer):
    daemon_threads = True
    seen: list[tuple[str, str, dict[str, str], Any]]
    behaviour: Behaviour

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def standing_in(behaviour: Behaviour, port: int = 0) -> Iterator[StandIn]:
    with StandIn(("127.0.0.1", port), Handler) as server:
        server.seen, server.behaviour = [], behaviour
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()


def answers(content: Any, status: int = 200) -> Behaviour:
    """JSON, or text as it is."""

    def behave(handler: Handler) -> None:
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return behave


def routed(said: Mapping[str, Any]) -> Behaviour:
    """Answers by path; what a path has no answer for, with nothing. A function is given the request's body."""

    def behave(handler: Handler) -> None:
        server: Any = handler.server
        content = said.get(handler.path.partition("?")[0], "")
        answers(content(server.seen[-1][3]) if callable(content) else content)(handler)

    return behave


def hangs(seconds: float = 3.0) -> Behaviour:
    """Takes the request, and says nothing."""
    return lambda handler: time.sleep(seconds)


def drips(handler: Handler) -> None:
    """Sends a byte now and then: no single wait is long."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(60):
        try:
            handler.wfile.write(b" ")
            handler.wfile.flush()
        except OSError:
            return
        time.sleep(0.05)


def breaks_off(handler: Handler) -> None:
    """Closes the connection in the middle of its answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    handler.connection.close()
