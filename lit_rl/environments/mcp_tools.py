"""`env=mcp`: the policy calls the tools of servers of the Model Context Protocol.

`MCPServer` starts a server and holds the connection in an event loop of its own; `MCPTools` is the environment.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import importlib.util
import json
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

from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry

from lit_rl.core.errors import BackendError, ConfigError, did_you_mean, excerpt
from lit_rl.core.event_loops import BackgroundLoop
from lit_rl.core.processes import supervised
from lit_rl.environments.factory import EnvironmentFactory, EnvironmentKind
from lit_rl.environments.observations import IMAGE_LIMIT, content_of, replace_surrogates
from lit_rl.environments.tools import Tool, ToolAnswer, Toolbox
from lit_rl.environments.user_environments import ToolsKind

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


class ServerLost(Exception):
    """A server ended while it was asked, or cannot be started again."""


@dataclass(frozen=True)
class ServerConfig:
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


class MCPServer:
    """One server. Its process starts when it is first asked.

    Args:
        place: Address of the server.
    """

    def __init__(self, place: ServerConfig) -> None:
        self._place = place
        self._session: _Session | None = None

    def tools(self) -> list[Listed]:
        """Return the tools that the server lists. Blocks this thread.

        Raises:
            BackendError: it does not start, or does not answer; with its last lines.
        """
        try:
            return _LOOP.wait(self._tools())
        except ServerLost as error:
            raise BackendError(str(error)) from error

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call a tool and return its result. Awaited in any event loop.

        Raises:
            ServerLost: the server ended meanwhile, or could not be started again.
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
            raise ServerLost(
                f"The MCP server {self._place.name!r} does not list its tools: {_error_text(error)}{session.last_lines}"
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
            raise ServerLost(
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

    def __init__(self, place: ServerConfig) -> None:
        self._place = place
        self._stderr = _LastLines() if place.command else None
        self._loop, self.pid = asyncio.get_running_loop(), os.getpid()
        self._client: asyncio.Future[Client] = self._loop.create_future()
        self._asked_to_end = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self.gone = futures.Future[None]()
        _SESSIONS.add(self)

        def note_end(done: asyncio.Task[None]) -> None:
            _SESSIONS.discard(self)
            self.gone.set_result(None)

        self._task.add_done_callback(note_end)

    @property
    def is_over(self) -> bool:
        """True if it has ended, is about to, or could not be started."""
        return self._task.done() or self._asked_to_end.is_set() or (self._stderr is not None and self._stderr.ended)

    @property
    def last_lines(self) -> str:
        """The last lines of its stderr, when it has ended."""
        return "" if self._stderr is None else f"\nThe last lines of its stderr:{self._stderr}"

    async def client(self) -> Client:
        """Return the client of the session, once it has started.

        Raises:
            ServerLost: it could not be started.
        """
        return await asyncio.shield(self._client)

    async def end(self) -> None:
        """End it, and wait until it has."""
        self._asked_to_end.set()
        await asyncio.wait([self._task])

    def end_soon(self) -> None:
        """End it. Called in any thread."""
        self._loop.call_soon_threadsafe(self._asked_to_end.set)

    async def _run(self) -> None:
        """Start it, and wait until it is to end: the task that entered a client has to leave it too."""
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        try:
            transport: Any = self._place.url
            if self._stderr is not None:
                program, *arguments = supervised(self._place.command, _GRACE)
                process = StdioServerParameters(command=program, args=arguments, env=self._place.variables)
                transport = stdio_client(process, errlog=self._stderr.file)
            async with asyncio.timeout(self._place.seconds) as limit, Client(transport) as client:
                limit.reschedule(None)
                self._close_our_stderr_end()
                self._client.set_result(client)
                await self._asked_to_end.wait()
        except Exception as error:
            self._close_our_stderr_end()
            if self._client.done():
                _log.debug("the MCP server %r ended with an error:", self._place.name, exc_info=True)
                return
            late = f"it took longer than env.step_timeout={self._place.seconds:g} s"
            why = late if isinstance(error, TimeoutError) else _error_text(error)
            self._client.set_exception(
                ServerLost(f"The MCP server {self._place.name!r} does not start: {why}{self.last_lines}")
            )
            self._client.exception()  # retrieved here, in case no caller waits for it

    def _close_our_stderr_end(self) -> None:
        """Close our end of its stderr, so that the end of the stream is the end of the process."""
        if self._stderr is not None:
            self._stderr.file.close()


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


def _error_text(error: BaseException) -> str:
    """Return an error in words: task groups wrap errors into groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "it took too long"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_KEYS = ("command", "url", "env", "tools")


class MCPTools(EnvironmentFactory):
    """Tools of servers of the Model Context Protocol: a turn that calls none is the answer.

    Servers are started, and say which tools they have, before weights are loaded. All rows of a process speak to the
    same one, so that what a call leaves behind in it, the next call of any row finds.

    Args:
        command: The words that start the one server there is, ``[python, ./server.py]``.
        servers: Several servers by name, in its place. Each has ``command`` or ``url``, of streamable HTTP; ``env``,
            variables of the process; and ``tools``, the names of those that the policy may call. All, without it.
        limits: Further arguments of `EnvironmentFactory`. A start may take ``step_timeout`` too.

    Raises:
        BackendError: the package mcp is not installed.
        ConfigError: no server, one that is not described right, or one whose program is not there.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        *,
        servers: dict[str, dict[str, Any]] | None = None,
        **limits: Any,
    ) -> None:
        super().__init__(**limits)
        if self.pool is not None:
            raise ConfigError(
                f"env.workers={self.pool.size} has no use with env=mcp: its servers are processes of their own, and a "
                "call that takes longer than env.step_timeout is ended anyway. Leave env.workers out."
            )
        if importlib.util.find_spec("mcp") is None:
            raise BackendError("env=mcp needs the package mcp: pip install 'lit-rl[mcp]'.")
        if (command is None) == (not servers):
            raise ConfigError(
                f"env.command={_list(command)} and env.servers={list(servers or ())}: give one of the two, "
                "env.command=[python,./server.py] or env.servers={calc: {command: [python,./server.py]}}."
            )
        if command is not None:
            self._servers = {"server": _ConfiguredServer("env", "server", {"command": command}, self.step_timeout)}
        else:
            named = (servers or {}).items()
            self._servers = {
                name: _ConfiguredServer(f"env.servers.{name}", name, each, self.step_timeout) for name, each in named
            }
        self._kinds: dict[str, EnvironmentKind] = {}

    @property
    def kinds(self) -> Mapping[str, EnvironmentKind]:
        """Starts the servers when it is first asked.

        Raises:
            BackendError: a server does not start or does not answer; with the last lines of its stderr.
            ConfigError: a server has no tools, not those it is to have, or two have one of the same name.
        """
        if not self._kinds:
            found: dict[str, _ServerTool] = {}
            for name, asked in self._servers.items():
                for tool in asked.tools():
                    if (other := found.get(tool.name)) is not None:
                        raise ConfigError(
                            f"The MCP servers {other.server!r} and {name!r} both have a tool {tool.name!r}, and the "
                            f"policy could not tell them apart. Say which tools one of them is to have without it: "
                            f"env.servers.{name}.tools=[...]."
                        )
                    found[tool.name] = tool
            self._kinds = {"tools": ToolsKind(Toolbox(list(found.values())))}
        return self._kinds


class _ConfiguredServer:
    """A server as the config describes it.

    Args:
        key: Key of the config.
        name: Name of the server.
        described: The keys of the config.
        seconds: Time limit of a start.

    Raises:
        ConfigError: a key is unknown, or of a wrong type; there is neither a command nor a url, or both.
    """

    def __init__(self, key: str, name: str, described: Mapping[str, Any], seconds: float) -> None:
        _check(key, described)
        self._key, self._name, self._chosen = key, name, described.get("tools")
        command = tuple(map(str, described.get("command") or ()))
        env = {variable: str(value) for variable, value in (described.get("env") or {}).items()}
        place = ServerConfig(name, command, env, described.get("url"), seconds)
        place.check()
        self._server = MCPServer(place)

    def tools(self) -> list[_ServerTool]:
        """Return the chosen tools of the server, in the order of the server.

        Raises:
            BackendError: it does not start.
            ConfigError: there are none, or one of those chosen is not there.
        """
        listed = {each.name: each for each in self._server.tools()}
        if not listed:
            raise ConfigError(f"The MCP server {self._name!r} lists no tools, so the policy could not call any.")
        chosen = list(listed) if self._chosen is None else list(self._chosen)
        for name in chosen:
            if name not in listed:
                raise ConfigError(
                    f"{self._key}.tools names {name!r}, but the server has {', '.join(listed)}."
                    f"{did_you_mean(name, listed)}"
                )
        return [_ServerTool(self._name, self._server, each) for each in listed.values() if each.name in chosen]


class _ServerTool(Tool):
    """One tool of a server.

    Args:
        server: Name of the server.
        connection: Connection to the server.
        listed: The server's description of the tool.

    Raises:
        ConfigError: its arguments are described by what is no JSON Schema.
    """

    def __init__(self, server: str, connection: MCPServer, listed: Listed) -> None:
        self.server, self._connection = server, connection
        parameters = {"type": "object", "properties": {}, **listed.input_schema}
        kind = validator_for(parameters, default=Draft202012Validator)
        try:
            kind.check_schema(parameters)
        except SchemaError as error:
            raise ConfigError(
                f"The MCP server {server!r} describes the arguments of its tool {listed.name!r} by what is no JSON "
                f"Schema: {excerpt(error.message)}."
            ) from error
        # Unknown arguments are errors unless the schema allows them, and no remote schema is fetched.
        strict = parameters if "additionalProperties" in parameters else {"unevaluatedProperties": False, **parameters}
        function = {"name": listed.name, "description": listed.description or "", "parameters": parameters}
        super().__init__({"type": "function", "function": function}, kind(strict, registry=Registry()))

    @property
    def is_async(self) -> bool:
        return True

    async def _answer(self, arguments: Mapping[str, Any]) -> ToolAnswer:
        try:
            result = await self._connection.call(self.name, arguments)
        except ServerLost:
            raise  # not the policy's fault: the episode fails
        except Exception as error:  # of `mcp`: the server rejects the call, or its result is invalid
            return ToolAnswer(replace_surrogates(f"error: {self.name}: {error}"), failed=True)
        shows = any(part.type == "image" for part in result.content)
        if shows and IMAGE_LIMIT.get() is not None and not result.is_error:
            parts: list[dict[str, Any]] = [
                {"type": "image", "image": base64.b64decode(part.data)}
                if part.type == "image"
                else {"type": "text", "text": _part(part)}
                for part in result.content
            ]
            return ToolAnswer.of(content_of(parts, f"The tool {self.name!r}"))
        text = replace_surrogates(_text(result))
        return ToolAnswer(f"error: {self.name}: {text}", failed=True) if result.is_error else ToolAnswer(text)


def _text(result: CallToolResult) -> str:
    """Return a tool's result as the policy reads it: texts one under the other, and all else described in words."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_part, result.content))


def _part(content: Any) -> str:
    match content.type:
        case "text":
            return content.text
        case "image" | "audio":
            return f"[{content.type} that cannot be shown: {content.mime_type}]"
        case "resource_link":
            return f"[link: {content.name} {content.uri}]"
    resource = content.resource
    text = getattr(resource, "text", None)
    return f"[file that cannot be shown: {resource.uri}]" if text is None else text


def _check(key: str, described: Any) -> None:
    """Refuse what describes no server.

    Raises:
        ConfigError: see `_ConfiguredServer`.
    """
    if not isinstance(described, Mapping):
        raise ConfigError(
            f"{key}={_list(described)!r} does not describe a server: write {{command: [python, ./server.py]}} or "
            "{url: http://...}."
        )
    for each in described:
        if each not in _KEYS:
            args = " All words of the command stand in one list." if each == "args" else ""
            raise ConfigError(
                f"{key}.{each} is unknown: a server has {', '.join(_KEYS)}.{did_you_mean(str(each), _KEYS)}{args}"
            )
    command, url, env, tools = (described.get(each) for each in _KEYS)
    if (command is None) == (url is None):
        found = "neither a command nor a url" if url is None else "a command and a url"
        raise ConfigError(f"{key} has {found}. Give command for a process to start, or url for a running server.")
    if url is not None and env:
        raise ConfigError(
            f"{key}.env sets variables of a process, but this server runs at {url}. Leave one of the two out."
        )
    if url is not None and not str(url).startswith(("http://", "https://")):
        raise ConfigError(f"{key}.url={url!r} does not begin with http:// or https://.")
    if command is not None and not (_is_list_of_words(command) and command):
        raise ConfigError(f"{key}.command={_list(command)!r} is no list of words, such as [python, ./server.py].")
    if env is not None and not (isinstance(env, Mapping) and _is_list_of_words(list(env.values()))):
        raise ConfigError(
            f"{key}.env does not give variables: write {{NAME: text}}, and quote what YAML reads otherwise."
        )
    if tools is not None and not _is_list_of_words(tools):
        raise ConfigError(f"{key}.tools={_list(tools)!r} is no list of names.")


def _is_list_of_words(values: Any) -> bool:
    """Tell whether a value is a list of words: texts, or numbers as YAML reads them."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return False
    return all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in values)


def _list(value: Any) -> Any:
    """Return a value for a message, without the class of the config's lists."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
