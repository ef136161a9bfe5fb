"""`env=mcp`: the policy calls the tools of servers of the Model Context Protocol."""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry

from lit_rl.data.checks import excerpt
from lit_rl.environments.factory import EnvironmentFactory, EnvironmentKind
from lit_rl.environments.function_tools import OnlyTools
from lit_rl.environments.mcp_connection import Lost, Place, Server
from lit_rl.environments.observations import IMAGE_LIMIT, content_of, writable
from lit_rl.environments.tools import Tool, ToolAnswer, Toolbox
from lit_rl.errors import BackendError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from mcp.types import CallToolResult
    from mcp.types import Tool as Listed

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
                f"env.workers={self.pool.size}: the servers of env=mcp are processes of their own: a call that takes "
                "longer than env.step_timeout is given up without workers. Leave env.workers out."
            )
        if importlib.util.find_spec("mcp") is None:
            raise BackendError("env=mcp needs the package mcp: pip install 'lit-rl[mcp]'.")
        if (command is None) == (not servers):
            raise ConfigError(
                f"env.command={_list(command)} and env.servers={list(servers or ())}: give one of the two, "
                "env.command=[python,./server.py] or env.servers={calc: {command: [python,./server.py]}}."
            )
        if command is not None:
            self._servers = {"server": _Asked("env", "server", {"command": command}, self.step_timeout)}
        else:
            named = (servers or {}).items()
            self._servers = {name: _Asked(f"env.servers.{name}", name, each, self.step_timeout) for name, each in named}
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
            self._kinds = {"tools": OnlyTools(Toolbox(list(found.values())))}
        return self._kinds


class _Asked:
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
        place = Place(name, command, env, described.get("url"), seconds)
        place.check()
        self._server = Server(place)

    def tools(self) -> list[_ServerTool]:
        """Return the chosen tools of the server, in the order of the server.

        Raises:
            BackendError: it does not start.
            ConfigError: there are none, or one of those chosen is not there.
        """
        listed = {each.name: each for each in self._server.tools()}
        if not listed:
            raise ConfigError(f"The MCP server {self._name!r} lists no tools, and the policy could call none.")
        chosen = list(listed) if self._chosen is None else list(self._chosen)
        for name in chosen:
            if name not in listed:
                raise ConfigError(
                    f"{self._key}.tools names {name!r}, and the server has {', '.join(listed)}."
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

    def __init__(self, server: str, connection: Server, listed: Listed) -> None:
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
        except Lost:
            raise  # not the policy's fault: the episode fails
        except Exception as error:  # of `mcp`: the server rejects the call, or its result is invalid
            return ToolAnswer(writable(f"error: {self.name}: {error}"), failed=True)
        shows = any(part.type == "image" for part in result.content)
        if shows and IMAGE_LIMIT.get() is not None and not result.is_error:
            return ToolAnswer.of(content_of(list(map(_seen, result.content)), f"The tool {self.name!r}"))
        text = writable(_text(result))
        return ToolAnswer(f"error: {self.name}: {text}", failed=True) if result.is_error else ToolAnswer(text)


def _text(result: CallToolResult) -> str:
    """Return a tool's result as the policy reads it: texts one under the other, and all else described in words."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_part, result.content))


def _seen(content: Any) -> dict[str, Any]:
    """Return a part of a tool's result for a policy over images."""
    if content.type != "image":
        return {"type": "text", "text": _part(content)}
    return {"type": "image", "image": base64.b64decode(content.data)}


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
        ConfigError: see `_Asked`.
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
        raise ConfigError(f"{key} has {found}: a server is a process, which has a command, or stands at a url.")
    if url is not None and env:
        raise ConfigError(f"{key}.env is for a process, and this server stands at {url}: leave one of them out.")
    if url is not None and not str(url).startswith(("http://", "https://")):
        raise ConfigError(f"{key}.url={url!r} does not begin with http:// or https://.")
    if command is not None and not (_are_words(command) and command):
        raise ConfigError(f"{key}.command={_list(command)!r} is no list of words, such as [python, ./server.py].")
    if env is not None and not (isinstance(env, Mapping) and _are_words(list(env.values()))):
        raise ConfigError(
            f"{key}.env does not give variables: write {{NAME: text}}, and quote what YAML reads otherwise."
        )
    if tools is not None and not _are_words(tools):
        raise ConfigError(f"{key}.tools={_list(tools)!r} is no list of names.")


def _are_words(values: Any) -> bool:
    """Tell whether a value is a list of words: texts, or numbers as YAML reads them."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return False
    return all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in values)


def _list(value: Any) -> Any:
    """Return a value for a message, without the class of the config's lists."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
