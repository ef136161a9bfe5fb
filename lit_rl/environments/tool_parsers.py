"""Parsers of tool calls in what the policy wrote: the forms that models of the common families were trained on.

`parser_for` chooses a parser by the tokenizer and its chat template; what all parsers share is in `parser_base`.

Forms: a JSON object (Hermes, Llama 3, Mistral), a name and JSON arguments (gpt-oss, DeepSeek V3), arguments between
tags, each as text whose type the tool's schema says (Qwen 3.5, Nemotron 3, GLM 4, Muse Glimmer), arguments written as
literals (LFM 2, Gemma 4), a pattern of the user's, and the response template of a tokenizer.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

from lit_rl.core.chat_template import apply_chat_template
from lit_rl.core.errors import ConfigError, excerpt
from lit_rl.data.rendering import control_tokens
from lit_rl.environments.parser_base import (
    BLANKS,
    UNREADABLE,
    AnyCall,
    BadCall,
    BlockParser,
    Blocks,
    FoundCalls,
    ParsedTurn,
    Parser,
    ScanningParser,
    TurnPiece,
    call_from,
    decode_json,
    json_end,
    named_call,
    place_after,
    without_surrogates,
)
from lit_rl.environments.thoughts import (
    BRACKETS,
    CHANNEL,
    MESSAGE_TOKEN,
    THINK,
    ChannelMessage,
    Thoughts,
    channel_messages,
    generation_prompt,
    split_thoughts,
)
from lit_rl.environments.tools import ToolCall
from lit_rl.ops.ranges import OneOf

Schemas = Sequence[Mapping[str, Any]]
"""Schemas of the tools."""

# ------------------------------------------------------------------ JSON objects, and a name before JSON arguments


class HermesParser(BlockParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once or more: Qwen 2.5 and 3, Hermes, SmolLM3."""

    _BLOCKS = Blocks("<tool_call>", "</tool_call>")

    def _calls(self, inside: str) -> list[AnyCall]:
        try:
            value = json.loads(inside)
        except UNREADABLE as error:
            return [BadCall(inside, f"the call is no JSON: {error}")]
        return [call_from(value, inside)]

    def _end(self, text: str, at: int) -> int | None:
        return json_end(text, at)


class Llama3Parser(ScanningParser):
    """A JSON object with ``name`` and ``parameters``, or several with ``;`` between them: Llama 3.

    No mark tells it from an answer that is JSON. What a turn begins with is a call if it has a name and parameters, or
    the name of a tool; an object in a text is one if it has the name of a tool and parameters. Behind
    ``<|python_tag|>`` all are calls.

    Args:
        schemas: Schemas of the tools, for their names.
    """

    _TAG = "<|python_tag|>"
    _OPENS = re.compile(r'<\|python_tag\|>|\{(?=\s*")')
    _CUT = re.compile(
        r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|function)"\s*:\s*"(?P<name>[^"]*)"'
        r'(?P<arguments>\s*,\s*"(?:parameters|arguments)")?'
    )
    """The beginning of a call that does not end."""

    def __init__(self, schemas: Schemas = ()) -> None:
        self._names = {schema["function"]["name"] for schema in schemas}

    def _find(self, text: str, at: int, thought: int) -> FoundCalls | None:
        place = at
        while (opened := self._OPENS.search(text, place)) is not None:
            begin = opened.start()
            first = not text[at:begin].strip()
            if opened[0] == self._TAG:
                return self._read(text, begin, opened.end(), thought)
            try:
                value, place = decode_json(text, begin)
            except UNREADABLE:  # an object that does not end is a call if it begins like one
                place, begins = begin + 1, self._CUT.match(text, begin)
                known = begins is not None and begins["name"] in self._names
                full = begins is not None and begins["arguments"] is not None
                typed = False
            else:
                inner = value["function"] if isinstance(value.get("function"), dict) else value
                name = inner.get("name", inner.get("function"))
                known = isinstance(name, str) and name in self._names
                full = isinstance(name, str) and not inner.keys().isdisjoint(("parameters", "arguments"))
                typed = value.get("type") == "function"
            if (known or full or typed) if first else (known and full):
                return self._read(text, begin, begin, thought)
        return None

    def _read(self, text: str, begin: int, at: int, thought: int) -> FoundCalls:
        """Read every object from a place on. An unreadable one extends to the end of the text or the next thought."""
        calls: list[AnyCall] = []
        while True:
            at = place_after(BLANKS, text, at)
            try:
                value, end = decode_json(text, at)
            except UNREADABLE as error:
                end = thought if thought > at else len(text)
                calls.append(BadCall(text[at:end], f"the call is no JSON: {error}"))
                return FoundCalls(begin, end, tuple(calls))
            calls.append(call_from(value, text[at:end]))
            at = place_after(BLANKS, text, end)
            at = place_after(BLANKS, text, at + 1) if text.startswith(";", at) else at
            if not text.startswith("{", at):
                return FoundCalls(begin, at if at == len(text) else end, tuple(calls))


class MistralParser(ScanningParser):
    """``[TOOL_CALLS]`` before a JSON list of calls, or ``[TOOL_CALLS]name[ARGS]{...}`` for each: Mistral, Ministral.

    The second form may give an id, ``[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}``, or do without ``[ARGS]``.
    """

    _TAG = "[TOOL_CALLS]"
    _NAMED = re.compile(r"\s*(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[{]*)\s*)?(?:\[ARGS\])?")
    thoughts = Thoughts((THINK, BRACKETS))

    def _find(self, text: str, at: int, thought: int) -> FoundCalls | None:
        begin = text.find(self._TAG, at)
        if begin < 0:
            return None
        inside = begin + len(self._TAG)
        named = self._NAMED.match(text, inside)
        try:
            value, end = decode_json(text, place_after(BLANKS, text, named.end() if named else inside))
        except UNREADABLE as error:
            end = text.find(self._TAG, inside)
            end = min(len(text) if end < 0 else end, thought if thought > begin else len(text))
            why = f"the call is no JSON: {error}" if named else f"the calls are no JSON list: {error}"
            return FoundCalls(begin, end, (BadCall(text[begin:end], why),))
        written = text[begin:end]
        if named is not None:
            call: dict[str, Any] = {"name": named["name"], "arguments": value, "id": named["id"] or None}
            return FoundCalls(begin, end, (call_from(call, written),))
        calls = [call_from(each, written) for each in (value if isinstance(value, list) else [value])]
        return FoundCalls(begin, end, tuple(calls))


class DeepSeekV3Parser(BlockParser):
    """``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` before a block of JSON: DeepSeek V3."""

    _BLOCKS = Blocks("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    _HEAD = re.compile(r"[^<]*<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n")
    _CALL = re.compile(rf"{_HEAD.pattern}(?P<arguments>.*)\n```\s*", re.DOTALL)
    _FENCE = re.compile(r"\s*\n```")
    _AROUND = re.compile(r"\s*<｜tool▁calls▁(?:(?P<begin>begin)|end)｜>\s*")

    def _find(self, text: str, at: int, thought: int) -> FoundCalls | None:
        found, around = super()._find(text, at, thought), self._AROUND.search(text, at)
        if around is None or (found is not None and found.begin < around.start()):
            return found
        begin, end = around.span()
        if around["begin"] and (found is None or found.begin != end):
            end = thought if thought > begin else len(text)
            return FoundCalls(begin, end, (BadCall(text[begin:end], f"no call stands behind {around[0].strip()}"),))
        return FoundCalls(begin, end, ())

    def _end(self, text: str, at: int) -> int | None:
        head = self._HEAD.match(text, at)
        value = None if head is None else json_end(text, head.end())
        fence = None if value is None else self._FENCE.match(text, value)
        return None if fence is None else fence.end()

    def _calls(self, inside: str) -> list[AnyCall]:
        found = self._CALL.fullmatch(inside)
        if found is None:
            return [BadCall(inside, "a call is function<｜tool▁sep｜>NAME, and a block of ```json on the next line")]
        return [named_call(found["name"].strip(), found["arguments"], inside)]


class GptOssParser(Parser):
    """Messages of the assistant on channels: one that is addressed to a tool is a call. gpt-oss.

    ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}``, with the address on either side of
    the channel. A message ends by ``<|end|>`` or ``<|call|>``, or with the turn. What is thought (on the channel
    analysis) is no content.
    """

    _ADDRESS = re.compile(r"\bto=(?:functions\.)?(?P<name>[^\s<]+)")
    _ENDS = re.compile(r"<\|(?:end|call|return)\|>\s*$")

    def pieces(self, text: str) -> Iterator[TurnPiece]:
        for message in channel_messages(text):
            address = self._ADDRESS.search(message.header)
            if address is None:
                yield TurnPiece(message.written, "thought" if message.thought else "said")
            else:
                yield TurnPiece(message.written, "calls", (self._call(address["name"], message),))

    def _call(self, name: str, message: ChannelMessage) -> AnyCall:
        if message.body is None:
            return BadCall(message.written, f"no {MESSAGE_TOKEN} stands behind the name")
        arguments = self._ENDS.sub("", message.body)
        ended = arguments != message.body
        return named_call(name, arguments.strip() or ("{}" if ended else ""), message.written)

    def _content(self, pieces: Sequence[TurnPiece]) -> str:
        return split_thoughts(super()._content(pieces))[0]


# ------------------------------------------------------------------ arguments between tags, as text


class TaggedParser(BlockParser, ABC):
    """The common base of parsers for tagged arguments.

    Args:
        schemas: Schemas of the tools, for the types of their arguments.
    """

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

    def __init__(self, schemas: Schemas) -> None:
        functions = [schema["function"] for schema in schemas]
        self._properties = {f["name"]: f.get("parameters", {}).get("properties", {}) for f in functions}

    def _end(self, text: str, at: int) -> int | None:
        """Return the place after the last of consecutive arguments, and the end of the call."""
        found = self._HEAD.match(text, at)
        while found is not None:
            at, found = found.end(), self._NEXT.match(text, found.end())
        closed = self._TAIL.match(text, at)
        return None if closed is None else closed.end()

    def _calls(self, inside: str) -> list[AnyCall]:
        found = self._CALL.fullmatch(inside)
        if found is None:
            return [BadCall(inside, f"a call is {self._FORM}")]
        if left := self._ARGUMENT.sub("", found["body"]).strip():
            return [BadCall(inside, f"an argument cannot be read: {excerpt(left, 40)}")]
        types = self._properties.get(found["name"], {})
        written = {each["key"]: each["value"] for each in self._ARGUMENT.finditer(found["body"])}
        return [ToolCall(found["name"], {key: parse_typed(value, types.get(key)) for key, value in written.items()})]


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


_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_NO_VALUE = object()


def parse_typed(text: str, schema: Any) -> Any:
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
    if word in _PYTHON_CONSTANTS:
        return _PYTHON_CONSTANTS[word]
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


# ------------------------------------------------------------------ arguments as literals

T = TypeVar("T")


class LiteralParser(BlockParser, ABC):
    """The common base of parsers for arguments that are written as literals."""

    _FORM: ClassVar[str]
    """The form of the inside, in words."""

    def _calls(self, inside: str) -> list[AnyCall]:
        try:
            calls, end = self._read(inside, 0)
            if inside[end:].strip():
                raise ValueError(f"the call ends before {inside[end : end + 20]!r}")
        except UNREADABLE as error:
            return [BadCall(inside, f"{self._FORM}: {error}")]
        return list(calls)

    def _end(self, text: str, at: int) -> int | None:
        try:
            return self._read(text, at)[1]
        except UNREADABLE:
            return None

    @abstractmethod
    def _read(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        """Return the calls at a place of a text, and the place after them.

        Raises:
            ValueError: there are none.
        """


class Lfm2Parser(LiteralParser):
    """``<|tool_call_start|>[name(key='text', other=3), name()]<|tool_call_end|>``: LFM 2 and 2.5."""

    _BLOCKS = Blocks("<|tool_call_start|>", "<|tool_call_end|>")
    _OPEN, _NAME = re.compile(r"\s*\["), re.compile(r"\s*(?P<name>[^\s(,\[\]'\"]+)\(")

    _FORM = "the calls are no list like [name(key=1), name(key='text')]"

    def _read(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        return _sequence(text, place_after(self._OPEN, text, at), "]", self._call)

    def _call(self, text: str, at: int) -> tuple[ToolCall, int]:
        end = place_after(self._NAME, text, at)
        pairs, closed = _sequence(text, end, ")", lambda text, at: _PYTHON.pair(text, at, _EQUALS))
        return ToolCall(text[at : end - 1].strip(), dict(pairs)), closed


class Gemma4Parser(LiteralParser):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:3}<tool_call|>``: Gemma 4, DiffusionGemma."""

    thoughts = Thoughts((THINK, CHANNEL))
    _BLOCKS = Blocks("<|tool_call>", "<tool_call|>")
    _NAME = re.compile(r"\s*call:(?P<name>[^\s{]+)\{")

    _FORM = 'a call is call:name{key:<|"|>text<|"|>,other:3}'

    def _read(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        end = place_after(self._NAME, text, at)
        pairs, closed = _sequence(text, end, "}", lambda text, at: _GEMMA.pair(text, at, _COLON))
        return [ToolCall(text[at:end].strip()[len("call:") : -1], dict(pairs))], closed


@dataclass(frozen=True)
class _Literals:
    """Values in lists and mappings. Numbers and words are everybody's; texts are quoted in more than one way."""

    quoted: re.Pattern[str]
    """A text with its quotes; the inside is the last group that matched."""
    unescaped: Callable[[str], str]

    def value(self, text: str, at: int) -> tuple[Any, int]:
        """Return the value at a place of a text, and the place after it.

        Raises:
            ValueError: there is none.
        """
        at = place_after(BLANKS, text, at)
        if (found := self.quoted.match(text, at)) is not None:
            return self.unescaped(found[found.lastindex or 0]), found.end()
        if text.startswith("[", at):
            return _sequence(text, at + 1, "]", self.value)
        if text.startswith("{", at):
            pairs, end = _sequence(text, at + 1, "}", lambda text, at: self.pair(text, at, _COLON))
            return dict(pairs), end
        if (found := _NUMBER.match(text, at)) is not None:
            return (float if found["broken"] else int)(found[0]), found.end()
        if (found := _WORD.match(text, at)) is not None:
            return _LITERAL_CONSTANTS[found[0]], found.end()
        raise ValueError(f"no value at {text[at : at + 20]!r}")

    def pair(
        self, text: str, at: int, assigned: tuple[re.Pattern[str], re.Pattern[str]]
    ) -> tuple[tuple[str, Any], int]:
        """Return a key and its value, and the place after them. The key may go without quotes."""
        bare, assign = assigned
        at = place_after(BLANKS, text, at)
        if (found := self.quoted.match(text, at)) is not None:
            key, at = self.unescaped(found[found.lastindex or 0]), found.end()
        else:
            end = place_after(bare, text, at)
            key, at = text[at:end].strip(), end
        value, at = self.value(text, place_after(assign, text, at))
        return (key, value), at


_COMMA = re.compile(r"\s*,")
_COLON = (re.compile(r"[^:,{}\[\]]+"), re.compile(r"\s*:"))
_EQUALS = (re.compile(r"[^=,()\[\]{}'\"]+"), re.compile(r"\s*="))
_NUMBER = re.compile(r"-?\d+(?P<broken>(?:\.\d*)?(?:[eE][+-]?\d+)?)")
_LITERAL_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_WORD = re.compile(r"(?:true|True|false|False|null|None)\b")
_ESCAPE = re.compile(r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<c>.))", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""} | {
    same: same for same in "\\'\"/"
}


def _sequence(text: str, at: int, close: str, one: Callable[[str, int], tuple[T, int]]) -> tuple[list[T], int]:
    """Return the items between commas up to a bracket, and the place after it."""
    found: list[T] = []
    at = place_after(BLANKS, text, at)
    while not text.startswith(close, at):
        item, at = one(text, place_after(_COMMA, text, at) if found else at)
        found.append(item)
        at = place_after(BLANKS, text, at)
    return found, at + len(close)


def _unescape_python(inside: str) -> str:
    """Return the inside of a quoted text of Python's, with its escapes resolved."""

    def unescape(found: re.Match[str]) -> str:
        if (character := found["c"]) is not None:
            return _ESCAPED.get(character, found[0])
        code = int(found["x"] or found["u"] or found["U"], 16)
        return chr(code) if code <= 0x10FFFF else found[0]

    text = _ESCAPE.sub(unescape, inside)
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_PYTHON = _Literals(re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL), _unescape_python)
_GEMMA = _Literals(re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL), str)


# ------------------------------------------------------------------ forms of the user's and the tokenizer's

PYTHON_CALL = r"(?P<name>\w+)\((?P<arguments>[^)]*)\)"
"""``multiply(17, 25)``."""


class RegexParser(ScanningParser):
    r"""A form of your own: a pattern with the groups ``name`` and ``arguments``.

    ``arguments`` are values in the order of the tool's, separated by commas, each as JSON: ``mul(17,25)`` with
    ``(?P<name>\w+)\((?P<arguments>[^)]*)\)``.

    Args:
        pattern: The regular expression of one call.
        schemas: Schemas of the tools, for the names of their arguments.

    Raises:
        ConfigError: the pattern cannot be compiled, or lacks a group.
    """

    def __init__(self, pattern: str, schemas: Schemas) -> None:
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

    def _find(self, text: str, at: int, thought: int) -> FoundCalls | None:
        # ^ matches the place after the first thoughts: these are no content
        first = 0 if (close := self.thoughts.begun) is None else self.thoughts.end(text, 0, close)
        while (following := self.thoughts.next(text, first))[0] == first < len(text):
            first = following[1]
        content, begin, end = text[first:], max(at - first, 0), max(thought - first, 0)
        found = self._next(content, begin, len(content))
        if found is not None and found.start() < end < found.end():
            found = self._next(content, begin, end) or found  # prefer a match that does not extend into a thought
        return None if found is None else FoundCalls(first + found.start(), first + found.end(), (self._call(found),))

    def _next(self, text: str, begin: int, end: int) -> re.Match[str] | None:
        return next((found for found in self._pattern.finditer(text, begin, end) if found[0]), None)

    def _call(self, found: re.Match[str]) -> AnyCall:
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
    """A parser by the ``response_template`` that the tokenizer of a model may bring.

    The template itself separates thoughts from content. The ``response_schema`` of older tokenizers has no reader
    any more: transformers drops it when it loads one.

    Args:
        tokenizer: Tokenizer with such a template.
        schemas: Schemas of the tools, for the types of arguments that are written as text.
        begin: The rendered prompt that a response goes on from: a template may have begun it, with an open ``<think>``.
    """

    _CALLS = "tool_calls"

    def __init__(self, tokenizer: Any, schemas: Schemas, begin: str) -> None:
        self._tokenizer = tokenizer
        self._settings: dict[str, Any] = {"prefix": begin, "tools": list(schemas) or None}

    def parse(self, text: str) -> ParsedTurn:
        if self.thoughts.begun is not None and self.thoughts.begun not in text:
            return ParsedTurn(text.strip())  # some templates take an open thought for content
        try:
            message = self._tokenizer.parse_response(text, **self._settings)
            written = message.get(self._CALLS) or ()
            calls = [call_from(call, json.dumps(call, default=str)) for call in written]
        except Exception as error:  # a template may raise anything
            return self._parse_each_call(text, error)
        content = str(message.get("content") or "") if calls else text
        return ParsedTurn(content.strip(), tuple(map(without_surrogates, calls)))

    def pieces(self, text: str) -> Iterator[TurnPiece]:
        """Yield the response as one piece: its template does not say where its parts stand."""
        turn = self.parse(text)
        if text:
            yield TurnPiece(text, "calls" if turn.calls else "said", turn.calls)

    def _parse_each_call(self, text: str, error: Exception) -> ParsedTurn:
        """Parse a response of which the template cannot read a part: each call by itself, so that a wrong one
        invalidates no other."""
        own = self._tokenizer.response_template
        field = own["fields"].get(self._CALLS)
        why = f"it cannot be read: {excerpt(str(error), 80)}"
        if field is None or not field.get("repeats"):
            return ParsedTurn("", (BadCall(text, why),))
        groups = re.findall(r"\(\?P?<(\w+)>", str(field.get("open_pattern", "")))
        raw = {key: value for key, value in field.items() if key not in ("content_args", "transform", "transform_each")}
        raw |= {"content": "text", "transform": {"body": "{content}"} | {name: f"{{{name}}}" for name in groups}}
        fields = {**own["fields"], self._CALLS: raw}
        try:
            message = self._tokenizer.parse_response(text, {**own, "fields": fields}, prefix=self._settings["prefix"])
        except Exception:  # another field than the calls is wrong
            return ParsedTurn("", (BadCall(text, why),))
        calls = [self._read_call(field, call) for call in message.get(self._CALLS) or ()] or [BadCall(text, why)]
        return ParsedTurn(str(message.get("content") or "").strip(), tuple(map(without_surrogates, calls)))

    def _read_call(self, field: Mapping[str, Any], raw: Mapping[str, str]) -> AnyCall:
        """Return one call, read by the template of calls alone."""
        alone = {key: value for key, value in field.items() if key not in _DELIMITERS}
        alone["transform"] = _filled(field.get("transform"), raw)
        settings = {**self._settings, "prefix": ""}
        try:
            own = {**self._tokenizer.response_template, "fields": {self._CALLS: alone}}
            (call,) = self._tokenizer.parse_response(raw["body"], own, **settings)[self._CALLS]
        except Exception as error:  # a template may raise anything
            return BadCall(json.dumps(raw, ensure_ascii=False), f"it cannot be read: {excerpt(str(error), 80)}")
        return call_from(call, json.dumps(call, default=str))


_DELIMITERS = ("open", "open_pattern", "close", "close_pattern")


def _filled(transform: Any, values: Mapping[str, str]) -> Any:
    """Fill the groups of the opening mark into a response template's transform."""
    if isinstance(transform, dict):
        return {key: _filled(value, values) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_filled(value, values) for value in transform]
    return values.get(transform[1:-1], transform) if isinstance(transform, str) and transform[:1] == "{" else transform


# ------------------------------------------------------------------ the choice

_FAMILIES: dict[str, Callable[[Schemas], Parser]] = {
    "hermes": lambda _: HermesParser(),
    "llama3": Llama3Parser,
    "mistral": lambda _: MistralParser(),
    "qwen3_5": Qwen35Parser,
    "glm4": Glm4Parser,
    "gptoss": lambda _: GptOssParser(),
    "deepseek_v3": lambda _: DeepSeekV3Parser(),
    "gemma4": lambda _: Gemma4Parser(),
    "lfm2": lambda _: Lfm2Parser(),
    "muse_glimmer": MuseGlimmerParser,
}

PARSERS = (*_FAMILIES, "regex")
"""Names of the forms that `env.parser` may choose."""

ParserName = Annotated[str, OneOf(("auto", *PARSERS))]
"""One of them, or the choice of it by the tokenizer."""

_TEMPLATE_MARKS = {
    "<tool_call>\n{": "hermes",
    "<tool_call>\\n{": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3",
    "'\"parameters\": '": "llama3",
}
"""Marks in the source of a chat template that describes calls of a form, where it does not render them itself."""

_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
"""A chat template without arguments."""

_PROBE = ToolCall("qqprobeqq", {"text": "qqalphaqq", "number": 17})
_PROBE_SCHEMA = {
    "type": "function",
    "function": {
        "name": _PROBE.name,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "A text."},
                "number": {"type": "integer", "description": "A number."},
            },
            "required": ["text", "number"],
        },
    },
}


def check_parser(name: str, pattern: str | None, prefix: str = "") -> None:
    """Check that a parser reads a pattern where one is given.

    Args:
        name: One of `PARSERS`, or ``auto``.
        pattern: Pattern of ``regex``, or None.
        prefix: Prefix of the names of the two settings, such as ``env.``.

    Raises:
        ConfigError: otherwise.
    """
    if name != "regex" and pattern is not None:
        raise ConfigError(
            f"{prefix}call_pattern={pattern!r} has no effect with {prefix}parser={name}: only {prefix}parser=regex "
            "reads a pattern. Set that, or leave the pattern out."
        )


def parser_for(
    name: str,
    tokenizer: Any,
    schemas: Schemas,
    pattern: str | None,
    template_kwargs: Mapping[str, Any] | None = _NO_ARGUMENTS,
) -> Parser:
    """Return the parser of a name, or the one that fits a tokenizer, with its marks of thoughts.

    Args:
        name: One of `PARSERS`, or ``auto``: by the tokenizer's ``response_template``; else the first that reads back
            a call which its chat template renders; else by what the chat template tells the model to write.
        tokenizer: Tokenizer of the policy.
        schemas: Schemas of the tools.
        pattern: Pattern of ``regex``; None is `PYTHON_CALL`.
        template_kwargs: Arguments that prompts are rendered with; None: prompts are plain texts.

    Raises:
        ConfigError: ``auto``, and nothing says how the model writes calls.
    """
    parser = _choose_parser(name, tokenizer, schemas, pattern, template_kwargs)
    parser.thoughts = parser.thoughts.of(tokenizer, template_kwargs)
    return parser


def _choose_parser(
    name: str, tokenizer: Any, schemas: Schemas, pattern: str | None, template_kwargs: Mapping[str, Any] | None
) -> Parser:
    if name == "regex":
        return RegexParser(PYTHON_CALL if pattern is None else pattern, schemas)
    if name != "auto":
        return _FAMILIES[name](schemas)
    if getattr(tokenizer, "response_template", None):
        begin = generation_prompt(tokenizer, template_kwargs) if template_kwargs is not None else ""
        return TemplateParser(tokenizer, schemas, begin)
    if template := tokenizer.chat_template:
        turns = list(rendered_call(tokenizer, _PROBE, [_PROBE_SCHEMA]))
        for make in _FAMILIES.values():
            for turn in turns:
                calls = make([_PROBE_SCHEMA]).parse(turn).calls
                if [isinstance(call, ToolCall) and replace(call, id=None) for call in calls] == [_PROBE]:
                    return make(schemas)
        for mark, family in _TEMPLATE_MARKS.items() if isinstance(template, str) else ():
            if mark in template:
                return _FAMILIES[family](schemas)
    raise ConfigError(
        "env.parser=auto: neither a response_template of the tokenizer nor its chat template shows how the model "
        f"writes tool calls. Set env.parser to {', '.join(PARSERS[:-1])}, or to regex with env.call_pattern."
    )


def rendered_call(tokenizer: Any, call: ToolCall, schemas: Schemas) -> Iterator[str]:
    """Yield the turn that calls a tool, as the chat template writes it: up to each of its control tokens, as one of
    them ends it, and then the whole turn. Nothing where the template renders no calls.

    Args:
        tokenizer: Tokenizer with a chat template.
        call: The call.
        schemas: Schemas of the tools that the template renders; may be none.
    """
    for arguments in (dict(call.arguments), json.dumps(dict(call.arguments))):
        function = {"name": call.name, "arguments": arguments}
        calls = [{"type": "function", "id": "call00000", "function": function}]
        asked = [{"role": "user", "content": "a"}]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        settings = {"tokenize": False, "tools": list(schemas) or None}
        try:
            prompt = apply_chat_template(tokenizer, asked, add_generation_prompt=True, **settings)
            before = apply_chat_template(tokenizer, asked, **settings)
            whole = apply_chat_template(tokenizer, [*asked, answer], **settings)
        except ConfigError:
            raise
        except Exception:  # a template may raise anything
            continue
        goes_on = whole.startswith(prompt)
        turn = whole[len(prompt if goes_on else before) :]
        turn = turn if goes_on else Thoughts().of(tokenizer, {"tools": settings["tools"]}).going_on(turn)
        cuts = (turn.rpartition(token) for token in control_tokens(tokenizer))
        yield from (before_it for before_it, token, _ in cuts if token)
        yield turn
        return
