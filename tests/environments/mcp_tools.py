"""A server of tools, as somebody would write it with the package mcp; the first argument says how it starts."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from typing import Literal

from mcp.server.mcpserver import Image, MCPServer
from pydantic import BaseModel

server = MCPServer("tools")


class Point(BaseModel):
    x: float
    y: float


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


@server.tool()
def distance(points: list[Point], norm: Literal["one", "max"] = "one", scale: float | None = None) -> str:
    """How far two points are apart."""
    first, second = points
    parts = [abs(first.x - second.x), abs(first.y - second.y)]
    return str((sum(parts) if norm == "one" else max(parts)) * (scale or 1.0))


@server.tool()
def divide(a: float, b: float) -> float:
    """Divide."""
    return a / b


GREY = "iVBORw0KGgoAAAANSUhEUgAAAAQAAAADCAAAAACRn/EaAAAAEElEQVR42mM8wcDAwMQAIwALLADOI6TNDAAAAABJRU5ErkJggg=="
"""A picture of 4 x 3 pixels."""


@server.tool()
def draw(words: str) -> list[str | Image]:
    """Draw words."""
    return [f"here is {words}:", Image(data=base64.b64decode(GREY), format="png"), "done"]


@server.tool()
async def after(seconds: float, word: str) -> str:
    """Say a word after some seconds."""
    await asyncio.sleep(seconds)
    return word


@server.tool()
def whoami() -> str:
    """The process, and what it has of the environment."""
    return json.dumps({"pid": os.getpid(), "python": sys.executable, "env": dict(os.environ)})


@server.tool()
def child() -> int:
    """Start a process that ignores what becomes of this one."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    return subprocess.Popen([sys.executable, "-c", deaf], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).pid


@server.tool()
def die(code: int) -> str:
    """End the server."""
    print("the server gives up", file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else "plain"
    if kind == "broken":
        raise RuntimeError("no database")
    if kind == "once" and os.path.exists(sys.argv[2]):
        raise RuntimeError("a second start is one too many")
    if kind == "once":
        open(sys.argv[2], "w").close()
    if kind == "hangs":
        time.sleep(60)
    server.run("streamable-http", port=int(sys.argv[2])) if kind == "http" else (
        MCPServer("empty") if kind == "empty" else server
    ).run("stdio")
