"""Calls whose arguments stand between tags, each as text: Qwen 3.5, Nemotron 3, GLM 4, Muse Glimmer.

The text does not say of which type it is: ``17`` may be a number or a text. The tool's schema says it.
"""

from __future__ import annotations

import json
import re
from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lit_rl.data.checks import excerpt
from lit_rl.environments.parsers import UNREADABLE, BadCall, Blocks, Call, Found, ScanningParser
from lit_rl.environments.tools import ToolCall


class TaggedParser(ScanningParser, ABC):
    """The common base of parsers for tagged arguments.

    Args:
        schemas: Schemas of the tools, for the types of their arguments.
    """

    _BLOCKS: ClassVar[Blocks]
    """The block of a call."""
    _CALL: ClassVar[re.Pattern[str]]
    """The whole inside of a block: groups ``name`` and ``body``."""
    _ARGUMENT: ClassVar[re.Pattern[str]]
    """One argument in the body: groups ``key`` and ``value``."""
    _HEAD: ClassVar[re.Pattern[str]]
    """The beginning of a call."""
    _NEXT: ClassVar[re.Pattern[str]]
    """One argument, behind which another one or the end stands."""
    _TAIL: ClassVar[re.Pattern[str]]
    """The end of a call."""
    _FORM: ClassVar[str]
    """The form of the inside, in words."""

    def __init__(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        functions = [schema["function"] for schema in schemas]
        self._properties = {f["name"]: f.get("parameters", {}).get("properties", {}) for f in functions}

    def _find(self, text: str, at: int, thought: int) -> Found | None:
        return self._BLOCKS.find(text, at, thought, self._call, self._end)

    def _end(self, text: str, at: int) -> int | None:
        """Return the place after the last of consecutive arguments, and the end of the call."""
        found = self._HEAD.match(text, at)
        while found is not None:
            at, found = found.end(), self._NEXT.match(text, found.end())
        closed = self._TAIL.match(text, at)
        return None if closed is None else closed.end()

    def _call(self, inside: str) -> list[Call]:
        found = self._CALL.fullmatch(inside)
        if found is None:
            return [BadCall(inside, f"a call is {self._FORM}")]
        if left := self._ARGUMENT.sub("", found["body"]).strip():
            return [BadCall(inside, f"an argument cannot be read: {excerpt(left, 40)}")]
        types = self._properties.get(found["name"], {})
        written = {each["key"]: each["value"] for each in self._ARGUMENT.finditer(found["body"])}
        return [ToolCall(found["name"], {key: typed(value, types.get(key)) for key, value in written.items()})]


class Qwen35Parser(TaggedParser):
    """``<function=NAME>`` and ``<parameter=KEY>`` on lines of their own: Qwen 3.5 to 3.8, Nemotron 3."""

    _BLOCKS = Blocks("<tool_call>", "</tool_call>", closed_by=r"(?:(?<=</function>)|(?<=</function>\n))</tool_call>")
    _CALL = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<body>.*)</function>\s*", re.DOTALL)
    _ARGUMENT = re.compile(
        r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
    )
    _HEAD = re.compile(r"\s*<function=[^>\n]+>")
    _NEXT = re.compile(r"\s*<parameter=[^>\n]+>.*?</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL)
    _TAIL = re.compile(r"\s*</function>")
    _FORM = "<function=NAME>, <parameter=KEY>VALUE</parameter> for each argument, </function>"


class Glm4Parser(TaggedParser):
    """The name, then ``<arg_key>`` and ``<arg_value>`` in turn: GLM 4.5 and newer."""

    _BLOCKS = Blocks("<tool_call>", "</tool_call>")
    _CALL = re.compile(r"\s*(?P<name>[^\s<{]+)\s*(?P<body>(?:<.*)?)", re.DOTALL)
    _ARGUMENT = re.compile(
        r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
    )
    _HEAD = re.compile(r"\s*[^\s<{]+")
    _NEXT = re.compile(
        r"\s*<arg_key>[^<]*</arg_key>\s*<arg_value>.*?</arg_value>(?=\s*(?:<arg_key>|</tool_call>))", re.DOTALL
    )
    _TAIL = re.compile("")
    _FORM = "NAME, and <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each argument"


class MuseGlimmerParser(TaggedParser):
    """``<atem:invoke name="NAME">`` with ``<atem:parameter name="KEY">`` in it: Muse Glimmer."""

    _BLOCKS = Blocks("<atem:function_calls>", "</atem:function_calls>")
    _CALL = re.compile(r'\s*<atem:invoke name="(?P<name>[^"]+)">(?P<body>.*)</atem:invoke>\s*', re.DOTALL)
    _ARGUMENT = re.compile(
        r'<atem:parameter name="(?P<key>[^"]*)">(?P<value>.*?)</atem:parameter>(?=\s*(?:<atem:parameter |\Z))',
        re.DOTALL,
    )
    _HEAD = re.compile(r'\s*<atem:invoke name="[^"]+">')
    _NEXT = re.compile(
        r'\s*<atem:parameter name="[^"]*">.*?</atem:parameter>(?=\s*(?:<atem:parameter |</atem:invoke>))', re.DOTALL
    )
    _TAIL = re.compile(r"\s*</atem:invoke>")
    _FORM = '<atem:invoke name="NAME">, <atem:parameter name="KEY">VALUE</atem:parameter> for each, </atem:invoke>'


_WORDS = {"True": True, "False": False, "None": None}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_NO_VALUE = object()


def typed(text: str, schema: Any) -> Any:
    """Convert an argument that was written as text to the type of its schema.

    Text where the schema wants nothing else, and where it cannot be what the schema wants: the tool says then what is
    wrong with it. A schema that says nothing takes JSON for what it is.

    Args:
        text: Text between the tags.
        schema: JSON Schema of the argument; None where the tool has no such argument.
    """
    types = _types(schema)
    value = _value(text)
    if value is _NO_VALUE or isinstance(value, str):
        return text
    fits = not types or _kind(value) in types or (_kind(value) == "integer" and "number" in types)
    return text if "string" in types and not fits else value


def _value(text: str) -> Any:
    """Return the value of JSON, or of a constant of Python's, which some templates write."""
    word = text.strip()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return json.loads(text)
    except UNREADABLE:
        return _NO_VALUE


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "null")


def _types(schema: Any) -> set[str]:
    """Return the types that a schema allows; empty where it does not say."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else set(named)
    types = types or set(map(_kind, schema.get("enum", ())))
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        if not (of_part := _types(part)):
            return set()
        types |= of_part
    return types | {"null"} if types and schema.get("nullable") else types
