"""What the hub's client talks to in tests: it takes a repository's files, and keeps them in memory. Not the hub."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HubStandIn:
    """Repositories by name, each with its files; the token that it wants."""

    def __init__(self, token: str) -> None:
        self.token, self.url = token, ""
        self.made: list[dict[str, Any]] = []
        self.files: dict[str, dict[str, bytes]] = {}
        """By repository, or `repository@branch`."""
        self.earlier: dict[str, list[dict[str, bytes]]] = {}
        """The files of a repository after each commit."""
        self.messages: list[str] = []
        self.answers = threading.Event()
        """Commits wait for it."""
        self.answers.set()
        self.at_once, self.most_at_once = 0, 0
        """Commits that are being made."""


class _Handler(BaseHTTPRequestHandler):
    stand_in: HubStandIn

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        repository, _, rest = self.path.removeprefix("/api/datasets/").partition("/tree/")
        if not rest:
            self._say(404, {"error": "Not found"})
            return
        files = self.stand_in.files.get(repository, {})
        self._say(200, [{"type": "file", "path": path, "size": len(files[path]), "oid": "1"} for path in files])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {self.stand_in.token}":
            self._say(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            self.stand_in.made.append(json.loads(body))
            self._say(200, {"url": f"{self.stand_in.url}/ann/{json.loads(body)['name']}"})
        elif "/preupload/" in self.path:
            asked = [each["path"] for each in json.loads(body)["files"]]
            files = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in asked]
            self._say(200, {"files": files})
        elif "/commit/" in self.path:
            repository, _, branch = self.path.split("/", 3)[3].partition("/commit/")
            repository += "" if branch == "main" else f"@{branch}"
            self.stand_in.at_once += 1
            self.stand_in.most_at_once = max(self.stand_in.most_at_once, self.stand_in.at_once)
            self.stand_in.answers.wait(30)
            self.stand_in.at_once -= 1
            self._keep(repository, [json.loads(line) for line in body.splitlines()])
            self._say(200, {"commitUrl": f"{self.stand_in.url}/{repository}/commit/1", "commitOid": "1"})
        else:
            self._say(200, {})

    def _keep(self, repository: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.stand_in.messages.append(value["summary"])
            elif line["key"] == "file":
                kept = self.stand_in.files.setdefault(repository, {})
                kept[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.stand_in.files[repository][value["path"]]
        self.stand_in.earlier.setdefault(repository, []).append(dict(self.stand_in.files.get(repository, {})))

    def _say(self, code: int, answer: Any) -> None:
        text = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def hub(token: str) -> Iterator[HubStandIn]:
    """Answers on a port of this machine while this lasts."""
    stand_in = HubStandIn(token)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stand_in": stand_in}))
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield stand_in
    finally:
        stand_in.answers.set()
        server.shutdown()
        server.server_close()
