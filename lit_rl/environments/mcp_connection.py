"""A server of the Model Context Protocol: started when it is first asked, again after it was lost, ended with this run.

What the package `mcp` holds of a server belongs to the event loop and to the task that began it, so all of them live in
one loop of their own. Environments ask from theirs, which may be given up for another one (see `Runner.leave`).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import shutil
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lit_rl import supervisor
from lit_rl.errors import BackendError, ConfigError
from lit_rl.rewards.execution.event_loops import BackgroundLoop

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult
    from mcp.types import Tool as Listed

_log = logging.getLogger(__name__)

_LOOP = BackgroundLoop("lit_rl-mcp")

_LAST_LINES, _LONGEST_LINE = 15, 2000
_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL, where a server does not end when its stdin does."""
_AT_EXIT = 10.0
"""Seconds in which all of them are over."""


class Lost(Exception):
    """A server ended while it was asked, or cannot be started again."""


@dataclass(frozen=True)
class Place:
    """The address of a server: a process to start, with stdin and stdout as transport, or a URL."""

    name: str
    """Name of the server, for messages."""
    command: Sequence[str]
    """The command line of a process; empty where there is a URL."""
    env: Mapping[str, str]
    """Variables that the process gets, beside HOME, USER, LOGNAME, SHELL, TERM, and PATH: this one begins with the
    folder of the Python that runs, so that `python` is the same."""
    url: str | None
    """URL of a server that speaks streamable HTTP."""
    seconds: float
    """Time limit of a start."""

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of the process."""
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        return {"PATH": path, **self.env}

    def check(self) -> None:
        """Refuse a command whose program is not there.

        Raises:
            ConfigError: names it.
        """
        if self.command and shutil.which(self.command[0], path=self.variables["PATH"]) is None:
            raise ConfigError(
                f"The command of the MCP server {self.name!r} cannot be run: there is no program {self.command[0]!r}. "
                f"The whole command is {' '.join(self.command)}."
            )


class Server:
    """One server. Its process starts when it is first asked.

    Args:
        place: Address of the server.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._session: _Session | None = None

    def tools(self) -> list[Listed]:
        """Return the tools that the server lists. Blocks this thread.

        Raises:
            BackendError: it does not start, or does not answer; with its last lines.
        """
        try:
            return _LOOP.wait(self._tools())
        except Lost as error:
            raise BackendError(str(error)) from error

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call a tool and return its result. Awaited in any event loop.

        Raises:
            Lost: the server ended meanwhile, or could not be started again.
            Exception: of the package, where the server says that the call is wrong, or gives what it may not.
        """
        return await asyncio.wrap_future(_LOOP.submit(self._call(tool, arguments)))

    # ------------------------------------------------------------------ in the loop of the servers

    async def _tools(self) -> list[Listed]:
        session = self._running()
        client, found, cursor = await session.client(), list[Any](), None
        try:
            async with asyncio.timeout(self._place.seconds):
                while True:
                    page = await client.list_tools(cursor=cursor)
                    found += page.tools
                    if not (cursor := page.next_cursor):
                        return found
        except Exception as error:
            await session.end()
            raise Lost(
                f"The MCP server {self._place.name!r} does not list its tools: {_told(error)}{session.last_lines}"
            ) from error

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> CallToolResult:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        session = self._running()
        client = await session.client()
        try:
            return await client.call_tool(tool, dict(arguments))
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            await session.end()
            raise Lost(
                f"The MCP server {self._place.name!r} was lost during a call of {tool!r}.{session.last_lines}"
            ) from error

    def _running(self) -> _Session:
        """Return the running session, started where there is none."""
        if self._session is None or self._session.is_over:
            if self._session is not None:
                self._session.end_soon()
            self._session = _Session(self._place)
            weakref.finalize(self, self._session.end_soon)
        return self._session


class _Session:
    """A server from its start to its end. Made in the loop of the servers, whose members are awaited there.

    Args:
        place: Address of the server.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._said = _LastLines() if place.command else None
        self._loop, self.pid = asyncio.get_running_loop(), os.getpid()
        self._client: asyncio.Future[Client] = self._loop.create_future()
        self._asked_to_end = asyncio.Event()
        self._task = asyncio.create_task(self._hold())
        self.gone = futures.Future[None]()
        _SESSIONS.add(self)
        self._task.add_done_callback(lambda done: self._is_gone())

    @property
    def is_over(self) -> bool:
        """True if it has ended, is about to, or could not be started."""
        return self._task.done() or self._asked_to_end.is_set() or (self._said is not None and self._said.ended)

    @property
    def last_lines(self) -> str:
        """The last lines of its stderr, when it has ended."""
        return "" if self._said is None else f"\nThe last lines of its stderr:{self._said}"

    async def client(self) -> Client:
        """Return the client of the session, once it has started.

        Raises:
            Lost: it could not be started.
        """
        return await asyncio.shield(self._client)

    async def end(self) -> None:
        """End it, and wait until it has."""
        self._asked_to_end.set()
        await asyncio.wait([self._task])

    def end_soon(self) -> None:
        """End it. Called in any thread."""
        self._loop.call_soon_threadsafe(self._asked_to_end.set)

    async def _hold(self) -> None:
        """Start it, and wait until it is to end: the task that entered a client has to leave it too."""
        from mcp import Client

        try:
            async with asyncio.timeout(self._place.seconds) as limit, Client(self._transport()) as client:
                limit.reschedule(None)
                self._heard_alone()
                self._client.set_result(client)
                await self._asked_to_end.wait()
        except Exception as error:
            self._heard_alone()
            if self._client.done():
                _log.debug("the MCP server %r ended with an error:", self._place.name, exc_info=True)
                return
            late = f"it took longer than env.step_timeout={self._place.seconds:g} s"
            why = late if isinstance(error, TimeoutError) else _told(error)
            self._client.set_exception(
                Lost(f"The MCP server {self._place.name!r} does not start: {why}{self.last_lines}")
            )
            self._client.exception()  # retrieved here, in case no caller waits for it

    def _transport(self) -> Any:
        """Return the transport for a client."""
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        if self._said is None:
            return self._place.url
        watched = ["-I", supervisor.__file__, str(os.getpid()), str(_GRACE), *self._place.command]
        process = StdioServerParameters(command=sys.executable, args=watched, env=self._place.variables)
        return stdio_client(process, errlog=self._said.file)

    def _heard_alone(self) -> None:
        """Close our end of its stderr, so that the end of the stream is the end of the process."""
        if self._said is not None:
            self._said.file.close()

    def _is_gone(self) -> None:
        _SESSIONS.discard(self)
        self.gone.set_result(None)


_SESSIONS: set[_Session] = set()
"""Sessions that are running."""


@atexit.register
def _end_all() -> None:
    sessions = [session for session in _SESSIONS if session.pid == os.getpid()]
    for session in sessions:
        session.end_soon()
    futures.wait([session.gone for session in sessions], timeout=_AT_EXIT)


class _LastLines:
    """The last lines of a process's stderr, read continuously: a full pipe would block it."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self.file = os.fdopen(write, "w")
        self._lines = deque[str](maxlen=_LAST_LINES)
        self._thread = threading.Thread(target=self._read, args=(read,), name="lit_rl-mcp-stderr", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True if the pipe has no writer any more: the process and its children are gone."""
        return not self._thread.is_alive()

    def __str__(self) -> str:
        self._thread.join(1.0)  # the last lines may still be in the pipe
        return "".join(f"\n    {line}" for line in self._lines) or "\n    (nothing)"

    def _read(self, read: int) -> None:
        with os.fdopen(read, errors="replace") as written:
            for line in iter(lambda: written.readline(_LONGEST_LINE), ""):
                self._lines.append("".join(c if c.isprintable() else " " for c in line).rstrip())


def _told(error: BaseException) -> str:
    """Return an error in words: task groups wrap errors into groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "it took too long"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
