"""Calls of tools in what the policy wrote: the forms that models of the common families were trained on.

A parser never raises on what a model wrote. What looks like a call and is none becomes a `BadCall`, which says why: the
policy is answered that, and it is counted.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.environments.tools import ToolCall
from lit_rl.errors import ConfigError

_UNREADABLE = (ValueError, RecursionError)
"""What reading JSON raises: the second of lists in lists in lists."""


@dataclass(frozen=True)
class BadCall:
    """What was meant as a call and cannot be read."""

    text: str
    why: str


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the policy, read."""

    content: str
    """The text beside the calls, without blanks around it."""
    calls: tuple[ToolCall | BadCall, ...] = ()


class Parser(ABC):
    """Reads calls in the text of a turn, control tokens included but for those that ended it."""

    def parse(self, text: str) -> ParsedTurn:
        """The calls in the order in which they were written. What stands in ``<think>`` is no call."""
        thoughts, said = _thinking(text)
        calls, rest = self._calls(said)
        return ParsedTurn((thoughts + rest).strip(), tuple(map(_writable, calls)))

    @abstractmethod
    def _calls(self, said: str) -> tuple[list[ToolCall | BadCall], str]:
        """The calls in a text, and the text without them."""


class HermesParser(Parser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once or more: Qwen 2.5 and 3, Hermes, SmolLM3."""

    _BLOCK = re.compile(r"<tool_call>(?P<call>.*?)(?:(?P<end></tool_call>)|(?=<tool_call>)|$)", re.DOTALL)

    def _calls(self, said: str) -> tuple[list[ToolCall | BadCall], str]:
        calls: list[ToolCall | BadCall] = []
        for found in self._BLOCK.finditer(said):
            if found["end"]:
                calls.append(_call_of(found["call"]))
            else:
                calls.append(BadCall(found[0], "the call is not closed by </tool_call>"))
        return calls, self._BLOCK.sub("", said)


class Llama3Parser(Parser):
    """A turn that is a JSON object with ``name`` and ``parameters``, or several with ``;`` between them: Llama 3."""

    _TAG = "<|python_tag|>"

    def _calls(self, said: str) -> tuple[list[ToolCall | BadCall], str]:
        text = said.strip()
        tagged = text.startswith(self._TAG)
        text = text.removeprefix(self._TAG).strip()
        if not tagged and not re.match(r'\{\s*"(?:name|type|function|parameters)"', text):
            return [], said
        calls: list[ToolCall | BadCall] = []
        while text:
            try:
                value, end = json.JSONDecoder().raw_decode(text)
            except _UNREADABLE as error:
                return [*calls, BadCall(text, f"the call is no JSON: {error}")], ""
            calls.append(_call_from(value, text[:end]))
            text = text[end:].lstrip().removeprefix(";").lstrip()
        return calls, ""


class MistralParser(Parser):
    """``[TOOL_CALLS]`` before a JSON list of calls, or ``[TOOL_CALLS]name[ARGS]{...}`` for each: Mistral, Ministral."""

    _TAG, _ARGS = "[TOOL_CALLS]", "[ARGS]"

    def _calls(self, said: str) -> tuple[list[ToolCall | BadCall], str]:
        before, *parts = said.split(self._TAG)
        calls: list[ToolCall | BadCall] = []
        for part in parts:
            name, args, rest = part.partition(self._ARGS)
            if args:
                calls.append(_call_of(f'{{"name": {json.dumps(name.strip())}, "arguments": {rest}}}'))
                continue
            try:
                listed = json.loads(part)
            except _UNREADABLE as error:
                calls.append(BadCall(part, f"the calls are no JSON list: {error}"))
                continue
            calls += [_call_from(value, part) for value in (listed if isinstance(listed, list) else [listed])]
        return calls, before


class RegexParser(Parser):
    r"""A form of your own: a pattern with the groups ``name`` and ``arguments``.

    ``arguments`` are values in the order of the tool's, separated by commas, each as JSON: ``mul(17,25)`` with
    ``(?P<name>\w+)\((?P<arguments>[^)]*)\)``.

    Args:
        pattern: The regular expression of one call.
        schemas: Of the tools, for the names of their arguments.

    Raises:
        ConfigError: the pattern cannot be compiled, or lacks a group.
    """

    def __init__(self, pattern: str, schemas: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"env.call_pattern={pattern!r} is no regular expression: {error}.") from error
        if missing := {"name", "arguments"} - self._pattern.groupindex.keys():
            raise ConfigError(
                f"env.call_pattern={pattern!r} has no group {' and no group '.join(sorted(missing))}. A call is read "
                r"by (?P<name>...) and (?P<arguments>...), such as (?P<name>\w+)\((?P<arguments>[^)]*)\)."
            )
        functions = [schema["function"] for schema in schemas]
        self._arguments = {f["name"]: list(f["parameters"].get("properties", {})) for f in functions}

    def _calls(self, said: str) -> tuple[list[ToolCall | BadCall], str]:
        return [self._call(found) for found in self._pattern.finditer(said)], self._pattern.sub("", said)

    def _call(self, found: re.Match[str]) -> ToolCall | BadCall:
        name, written = found["name"], found["arguments"]
        try:
            values = json.loads(f"[{written}]")
        except _UNREADABLE as error:
            return BadCall(found[0], f"the arguments are no JSON values: {error}")
        names = self._arguments.get(name, [])
        if name in self._arguments and len(values) > len(names):
            return BadCall(found[0], f"{name} takes {len(names)} arguments, and {len(values)} came")
        return ToolCall(name, dict(zip(names, values)))


class TemplateParser(Parser):
    """By the ``response_template`` that the tokenizer of a model may bring (transformers 5.13 and newer).

    Args:
        tokenizer: With such a template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def parse(self, text: str) -> ParsedTurn:
        """The template says itself what is thought and what is said."""
        calls, rest = self._calls(text)
        return ParsedTurn(rest.strip(), tuple(map(_writable, calls)))

    def _calls(self, said: str) -> tuple[list[ToolCall | BadCall], str]:
        try:
            message = self._tokenizer.parse_response(said, prefix="")
        except Exception as error:  # a template is a program: whatever it raises, it cannot read this
            return [BadCall(said, f"it cannot be read: {excerpt(str(error), 80)}")], ""
        calls = [_call_from(call, json.dumps(call, default=str)) for call in message.get("tool_calls") or ()]
        return calls, str(message.get("content") or "") if calls else said


PYTHON_CALL = r"(?P<name>\w+)\((?P<arguments>[^)]*)\)"
"""``multiply(17, 25)``."""

PARSERS = ("hermes", "llama3", "mistral", "regex")
"""Names of the forms that `env.parser` may choose."""

_MARKS = {
    "<tool_call>\n{": HermesParser,
    "<tool_call>\\n{": HermesParser,
    "[TOOL_CALLS]": MistralParser,
    "<|python_tag|>": Llama3Parser,
    "'\"parameters\": '": Llama3Parser,
}
"""What a chat template writes where it renders calls of this form, as in its source."""


def parser_for(name: str, tokenizer: Any, schemas: Sequence[Mapping[str, Any]], pattern: str | None) -> Parser:
    """The parser of a name, or the one that fits a tokenizer.

    Args:
        name: One of `PARSERS`, or ``auto``: by the tokenizer's ``response_template``, else by its chat template.
        tokenizer: Of the policy.
        schemas: Of the tools.
        pattern: Of ``regex``; None is `PYTHON_CALL`.

    Raises:
        ConfigError: ``auto``, and nothing says how the model writes calls.
    """
    if name == "regex":
        return RegexParser(PYTHON_CALL if pattern is None else pattern, schemas)
    if name != "auto":
        return {"hermes": HermesParser, "llama3": Llama3Parser, "mistral": MistralParser}[name]()
    if getattr(tokenizer, "response_template", None):
        return TemplateParser(tokenizer)
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    for mark, parser in _MARKS.items():
        if mark in template:
            return parser()
    raise ConfigError(
        "env.parser=auto: neither a response_template of the tokenizer nor its chat template says how the model writes "
        f"calls of tools. Say it: env.parser is {', '.join(PARSERS[:-1])}, or regex with env.call_pattern."
    )


def _call_of(text: str) -> ToolCall | BadCall:
    try:
        value = json.loads(text)
    except _UNREADABLE as error:
        return BadCall(text, f"the call is no JSON: {error}")
    return _call_from(value, text)


def _call_from(value: Any, text: str) -> ToolCall | BadCall:
    """A call from an object with a name and arguments; these are called parameters by Llama, and may be JSON text."""
    if not isinstance(value, dict):
        return BadCall(text, f"a call is an object with name and arguments, not {excerpt(json.dumps(value), 40)}")
    value = value.get("function") if isinstance(value.get("function"), dict) else value
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return BadCall(text, "the call has no name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except _UNREADABLE as error:
            return BadCall(text, f"the arguments are no JSON: {error}")
    if not isinstance(arguments, dict):
        return BadCall(text, f"the arguments are no object: {excerpt(json.dumps(arguments), 40)}")
    id_ = value.get("id")
    return ToolCall(name, arguments, id_ if isinstance(id_, str) else None)


def _writable(call: ToolCall | BadCall) -> ToolCall | BadCall:
    """Without halves of characters, which JSON can spell and no file can hold."""
    if isinstance(call, BadCall):
        return call
    text = json.dumps([call.name, call.arguments], ensure_ascii=False)
    if text.isascii():
        return call
    name, arguments = json.loads(text.encode("utf-8", "replace"))
    return ToolCall(name, arguments, call.id)


def _thinking(text: str) -> tuple[str, str]:
    """What was thought, and what was said behind it. Thoughts that do not end are all that there is."""
    if "</think>" in text:
        thoughts, end, said = text.rpartition("</think>")
        return thoughts + end, said
    return (text, "") if "<think>" in text else ("", text)
