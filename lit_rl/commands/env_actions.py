"""What a policy says in the episodes of `lit-rl env-check`: texts of every sort, and calls of the tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_rl.environments.parser_choice import rendered_call
from lit_rl.environments.parsers import Parser
from lit_rl.environments.tools import Toolbox, ToolCall

NONSENSE = "nonsense"
_LONG = "word " * 1000
_NO_TOOL = "no_such_tool"

_EXAMPLES = {"string": "a", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
"""Example values by the type of a JSON schema."""


def texts(tokenizer: Any) -> list[str]:
    """Return a number, nonsense, nothing, a long text, and a control token spelled out."""
    return ["0", NONSENSE, "", _LONG, str(tokenizer.eos_token)]


def calls(toolbox: Toolbox) -> dict[str, ToolCall]:
    """Return calls by description: for each tool a correct one, if example values can make one, and one without its
    arguments; and one of a missing tool."""
    made: dict[str, ToolCall] = {}
    for name, tool in toolbox.tools.items():
        arguments = _example(tool.schema["function"]["parameters"])
        if tool.wrong_with(arguments) is None:
            made[f"a call of {name}"] = ToolCall(name, arguments)
        if tool.wrong_with({}) is not None:
            made[f"a call of {name} without arguments"] = ToolCall(name, {})
    return made | {"a call of no tool": ToolCall(_NO_TOOL, {})}


def scripts(said: Sequence[str], most: int) -> list[tuple[str, ...]]:
    """Return the turns of several episodes, so that each text begins one.

    Args:
        said: The texts.
        most: Turns of an episode.
    """
    return [(*said[first:], *said[:first])[:most] for first in range(len(said))]


def written(call: ToolCall, parser: Parser, tokenizer: Any) -> str | None:
    """Return the call in the first form that the run's own parser reads; None: it reads none that is known."""
    for text in _forms(call, parser, tokenizer):
        read = parser.parse(text).calls
        if len(read) == 1 and isinstance(read[0], ToolCall) and _asks(read[0]) == _asks(call):
            return text
    return None


def _asks(call: ToolCall) -> tuple[str, dict[str, Any]]:
    return call.name, dict(call.arguments)


def _forms(call: ToolCall, parser: Parser, tokenizer: Any) -> Iterator[str]:
    arguments = dict(call.arguments)
    for form in (
        f"{call.name}({', '.join(map(json.dumps, arguments.values()))})",
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': arguments})}\n</tool_call>",
        json.dumps({"name": call.name, "parameters": arguments}),
        f"[TOOL_CALLS]{json.dumps([{'name': call.name, 'arguments': arguments}])}",
    ):
        yield parser.thoughts.going_on(form)
    if tokenizer.chat_template:
        yield from rendered_call(tokenizer, call, [])


def _example(schema: Mapping[str, Any]) -> Any:
    """Return a value that fits a JSON schema."""
    if schema.get("enum"):
        return schema["enum"][0]
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _example(options[0])
    type_ = schema.get("type")
    type_ = type_[0] if isinstance(type_, list) and type_ else type_
    if type_ == "object" and schema.get("properties"):
        return {name: _example(part) for name, part in schema["properties"].items()}
    return _EXAMPLES.get(str(type_), "a")
