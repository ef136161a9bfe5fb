"""Calls of tools in what the policy wrote: the forms that models of the common families were trained on.

A parser never raises on what a model wrote. What looks like a call and is none becomes a `BadCall`, which says why: the
policy is answered that, and it is counted.
"""

from __future__ import annotations

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lit_rl.chat_template import apply_chat_template
from lit_rl.data.checks import excerpt
from lit_rl.environments.tools import ToolCall
from lit_rl.errors import ConfigError

UNREADABLE = (ValueError, RecursionError)
"""What reading raises: the second of lists in lists in lists."""


@dataclass(frozen=True)
class BadCall:
    """What was meant as a call and cannot be read."""

    text: str
    why: str


Call: TypeAlias = ToolCall | BadCall


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the policy, read."""

    content: str
    """The text beside the calls, without blanks around it."""
    calls: tuple[Call, ...] = ()


class Parser(ABC):
    """Reads calls in the text of a turn, control tokens included but for those that ended it."""

    _THOUGHT = ("<think>", "</think>")
    """What thoughts stand between."""

    def parse(self, text: str) -> ParsedTurn:
        """The calls in the order in which they were written. What stands in thoughts is no call."""
        thoughts, said = _thinking(text, *self._THOUGHT)
        calls, rest = self._calls(said)
        return ParsedTurn((thoughts + rest).strip(), tuple(map(_writable, calls)))

    @abstractmethod
    def _calls(self, said: str) -> tuple[list[Call], str]:
        """The calls in a text, and the text without them."""


class Blocks:
    """The parts of a text between an opening and a closing mark. One that is not closed ends where the next opens.

    Args:
        opening: The mark in front.
        closing: The mark behind.
        closed_by: Where the closing mark may stand within a block too: a pattern of the one that closes it.
    """

    def __init__(self, opening: str, closing: str, *, closed_by: str | None = None) -> None:
        self._closing, opened = closing, re.escape(opening)
        end = re.escape(closing) if closed_by is None else closed_by
        self._pattern = re.compile(rf"{opened}(?P<inside>.*?)(?:(?P<end>{end})|(?={opened})|\Z)", re.DOTALL)

    def read(self, said: str, calls_of: Callable[[str], list[Call]]) -> tuple[list[Call], str]:
        """The calls in the blocks of a text, by a reader of what stands in one, and the text without the blocks."""
        calls: list[Call] = []
        for found in self._pattern.finditer(said):
            if found["end"]:
                calls += calls_of(found["inside"])
            else:
                calls.append(BadCall(found[0], f"the call is not closed by {self._closing}"))
        return calls, self._pattern.sub("", said)


class HermesParser(Parser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once or more: Qwen 2.5 and 3, Hermes, SmolLM3."""

    _BLOCKS = Blocks("<tool_call>", "</tool_call>")

    def _calls(self, said: str) -> tuple[list[Call], str]:
        return self._BLOCKS.read(said, lambda inside: [_call_of(inside)])


class Llama3Parser(Parser):
    """A turn that is a JSON object with ``name`` and ``parameters``, or several with ``;`` between them: Llama 3."""

    _TAG = "<|python_tag|>"

    def _calls(self, said: str) -> tuple[list[Call], str]:
        text = said.strip()
        tagged = text.startswith(self._TAG)
        text = text.removeprefix(self._TAG).strip()
        if not tagged and not re.match(r'\{\s*"(?:name|type|function|parameters)"', text):
            return [], said
        calls: list[Call] = []
        while text:
            try:
                value, end = json.JSONDecoder().raw_decode(text)
            except UNREADABLE as error:
                return [*calls, BadCall(text, f"the call is no JSON: {error}")], ""
            calls.append(call_from(value, text[:end]))
            text = text[end:].lstrip().removeprefix(";").lstrip()
        return calls, ""


class MistralParser(Parser):
    """``[TOOL_CALLS]`` before a JSON list of calls, or ``[TOOL_CALLS]name[ARGS]{...}`` for each: Mistral, Ministral."""

    _TAG, _ARGS = "[TOOL_CALLS]", "[ARGS]"

    def _calls(self, said: str) -> tuple[list[Call], str]:
        before, *parts = said.split(self._TAG)
        calls: list[Call] = []
        for part in parts:
            name, args, rest = part.partition(self._ARGS)
            if args:
                calls.append(_call_of(f'{{"name": {json.dumps(name.strip())}, "arguments": {rest}}}'))
                continue
            try:
                listed = json.loads(part)
            except UNREADABLE as error:
                calls.append(BadCall(part, f"the calls are no JSON list: {error}"))
                continue
            calls += [call_from(value, part) for value in (listed if isinstance(listed, list) else [listed])]
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

    def _calls(self, said: str) -> tuple[list[Call], str]:
        return [self._call(found) for found in self._pattern.finditer(said)], self._pattern.sub("", said)

    def _call(self, found: re.Match[str]) -> Call:
        name, written = found["name"], found["arguments"]
        try:
            values = json.loads(f"[{written}]")
        except UNREADABLE as error:
            return BadCall(found[0], f"the arguments are no JSON values: {error}")
        names = self._arguments.get(name, [])
        if name in self._arguments and len(values) > len(names):
            return BadCall(found[0], f"{name} takes {len(names)} arguments, and {len(values)} came")
        return ToolCall(name, dict(zip(names, values)))


class TemplateParser(Parser):
    """By the ``response_template`` that the tokenizer of a model may bring (transformers 5.13 and newer).

    The ``response_schema`` of older tokenizers has no reader any more: transformers drops it when it loads one.

    Args:
        tokenizer: With such a template.
        schemas: Of the tools, for the types of arguments that are written as text.
    """

    def __init__(self, tokenizer: Any, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._settings: dict[str, Any] = {"prefix": _generation_prompt(tokenizer)}
        if "tools" in inspect.signature(tokenizer.parse_response).parameters:  # not in the oldest transformers
            self._settings["tools"] = list(schemas) or None

    def parse(self, text: str) -> ParsedTurn:
        """The template says itself what is thought and what is said."""
        calls, rest = self._calls(text)
        return ParsedTurn(rest.strip(), tuple(map(_writable, calls)))

    def _calls(self, said: str) -> tuple[list[Call], str]:
        try:
            message = self._tokenizer.parse_response(said, **self._settings)
        except Exception as error:  # a template is a program: whatever it raises, it cannot read this
            return [BadCall(said, f"it cannot be read: {excerpt(str(error), 80)}")], ""
        calls = [call_from(call, json.dumps(call, default=str)) for call in message.get("tool_calls") or ()]
        return calls, str(message.get("content") or "") if calls else said


def _generation_prompt(tokenizer: Any) -> str:
    """What a turn of the policy goes on from: a template may have begun it, with an open ``<think>``."""
    if not tokenizer.chat_template:
        return ""
    asked = [{"role": "user", "content": "a"}]
    return str(apply_chat_template(tokenizer, asked, tokenize=False, add_generation_prompt=True))


def _call_of(text: str) -> Call:
    try:
        value = json.loads(text)
    except UNREADABLE as error:
        return BadCall(text, f"the call is no JSON: {error}")
    return call_from(value, text)


def call_from(value: Any, text: str) -> Call:
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
        except UNREADABLE as error:
            return BadCall(text, f"the arguments are no JSON: {error}")
    if not isinstance(arguments, dict):
        return BadCall(text, f"the arguments are no object: {excerpt(json.dumps(arguments), 40)}")
    id_ = value.get("id")
    return ToolCall(name, arguments, id_ if isinstance(id_, str) else None)


def _writable(call: Call) -> Call:
    """Without halves of characters, which JSON can spell and no file can hold."""
    if isinstance(call, BadCall):
        return call
    text = json.dumps([call.name, call.arguments], ensure_ascii=False)
    if text.isascii():
        return call
    name, arguments = json.loads(text.encode("utf-8", "replace"))
    return ToolCall(name, arguments, call.id)


def _thinking(text: str, begin: str, end: str) -> tuple[str, str]:
    """What was thought, and what was said behind it. Thoughts that do not end are all that there is."""
    if end in text:
        thoughts, end, said = text.rpartition(end)
        return thoughts + end, said
    return (text, "") if begin in text else ("", text)
