"""A stand-in for a judge: an API for chat completions that says what a test tells it to. No model is behind it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any], int], tuple[Any, ...]]
"""From the body of a request and its number, counted from 1, to status, content and headers."""


class Listening(ThreadingHTTPServer):
    request_queue_size = 128  # connections that arrive together are not put off


class StandInJudge:
    """A chat API on this machine without any model: answers as it is told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.types: list[str | None] = []
        self.answer: Answer = lambda body, number: (200, "verdict: A")
        self.models: list[str] | None = ["m"]
        """The names that it lists; None: it has no such route."""
        self.under_way = self.most = 0
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.asked.append(body | {"path": self.path})
                    outer.headers.append(self.headers.get("Authorization"))
                    outer.types.append(self.headers.get("Content-Type"))
                    outer.under_way += 1
                    outer.most = max(outer.most, outer.under_way)
                    number = len(outer.asked)
                status, said, *headers = outer.answer(body, number)
                content = said if isinstance(said, bytes) else json.dumps(chat(said)).encode()
                with lock:
                    outer.under_way -= 1
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", content.decode())
                for name, value in headers[0].items() if headers else ():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                """The list of models; what a redirect makes of a POST is answered with a verdict."""
                outer.headers.append(self.headers.get("Authorization"))
                is_list = self.path == "/v1/models"
                self.send_response(404 if is_list and outer.models is None else 200)
                self.end_headers()
                listed = {"data": [{"id": name} for name in outer.models or ()]}
                self.wfile.write(json.dumps(listed if is_list else chat("verdict: A")).encode())

            def log_message(self, *_: Any) -> None:  # pyright: ignore
                pass

        self.http = Listening(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/v1"

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def chat(text: str | None, finish_reason: str = "stop") -> dict[str, Any]:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": usage}


@contextmanager
def standing_in_for_a_judge() -> Iterator[StandInJudge]:
    made = StandInJudge()
    try:
        yield made
    finally:
        made.close()


def marked(content: str, name: str) -> str:
    """The text between the marks of this name in a message, of which there is one pair."""
    ((mark, text, end),) = re.findall(rf"<({name}-[0-9a-f]{{16}})>\n(.*?)\n</(\1)>", content, re.DOTALL)
    assert mark == end
    return text
