"""Calls of tools in what the policy wrote: the forms that models of the common families were trained on.

A parser never raises on what a model wrote. What looks like a call and is none becomes a `BadCall`, which says why: the
policy is answered that, and it is counted.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from lit_rl.data.checks import excerpt
from lit_rl.environments.thoughts import BRACKETS, THINK, Thoughts
from lit_rl.environments.tools import ToolCall
from lit_rl.errors import ConfigError

UNREADABLE = (ValueError, RecursionError)
"""Errors of reading: `RecursionError` comes of deeply nested lists."""


@dataclass(frozen=True)
class BadCall:
    """A call that cannot be read."""

    text: str
    why: str


Call: TypeAlias = ToolCall | BadCall


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the policy, read."""

    content: str
    """The text beside the calls, without blanks around it."""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part of a response. All parts, in their order, are the response."""

    text: str
    kind: Literal["said", "thought", "calls"]
    calls: tuple[Call, ...] = ()
    """In the order in which they were written. A mark around calls is a piece without any."""


@dataclass(frozen=True)
class Found:
    """Calls that were found in a text."""

    begin: int
    end: int
    calls: tuple[Call, ...]


class Parser(ABC):
    """A reader of calls in the text of a turn, control tokens included but for those that ended it."""

    thoughts = Thoughts()
    """Marks of thoughts, and whether a response begins in one. `parser_for` takes them from the chat template."""

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls in the order in which they were written, and the other text."""
        pieces = list(self.pieces(text))
        calls = tuple(_writable(call) for piece in pieces for call in piece.calls)
        return ParsedTurn(self._content([piece for piece in pieces if piece.kind != "calls"]).strip(), calls)

    @abstractmethod
    def pieces(self, text: str) -> Iterator[Piece]:
        """Yield the thoughts, the calls and what else is said."""

    def _content(self, pieces: Sequence[Piece]) -> str:
        """Return the content of the message, made of what is no call."""
        return "".join(piece.text for piece in pieces)


class ScanningParser(Parser):
    """A parser that goes from left to right.

    What opens first, a thought or a call, ends where it ends: a call in a thought is none, and a mark of thoughts in
    the arguments of a call is a part of them. Fences of code mean nothing to it.
    """

    def pieces(self, text: str) -> Iterator[Piece]:
        """Yield thoughts, calls and other text."""
        at = 0
        if text and (close := self.thoughts.begun) is not None:
            at = self.thoughts.end(text, 0, close)
            yield Piece(text[:at], "thought")
        while at < len(text):
            thought, behind = self.thoughts.next(text, at)
            found = self._find(text, at, thought)
            begin = thought if found is None else min(thought, found.begin)
            if at < begin:
                yield Piece(text[at:begin], "said")
            at = begin
            if found is not None and found.begin == begin:
                yield Piece(text[begin : found.end], "calls", found.calls)
                at = found.end
            elif begin < len(text):
                yield Piece(text[begin:behind], "thought")
                at = behind

    @abstractmethod
    def _find(self, text: str, at: int, thought: int) -> Found | None:
        """Return the next calls, which may stand in a thought.

        Args:
            text: All of the response.
            at: Start of the search: nothing before it is a call.
            thought: Start of the next thought.
        """


class Blocks:
    """The parts of a text between an opening and a closing mark. One that is not closed ends where the next opens.

    Args:
        opening: The mark in front.
        closing: The mark behind.
        closed_by: Pattern of the closing mark that ends the block, where the mark may stand within a block too.
    """

    def __init__(self, opening: str, closing: str, *, closed_by: str | None = None) -> None:
        self._opening, self._closing = opening, closing
        plain, opened = re.escape(closing), re.escape(opening)
        self._behind = re.compile(rf"\s*{plain}")
        self._ends = [re.compile(rf"(?P<end>{end})|(?={opened})") for end in dict.fromkeys((closed_by or plain, plain))]

    def find(
        self,
        text: str,
        at: int,
        thought: int,
        calls_of: Callable[[str], list[Call]],
        end_of: Callable[[str, int], int | None] = lambda *_: None,
    ) -> Found | None:
        """Return the next block.

        Args:
            text: Text to search.
            at: Start of the search.
            thought: Start of the next thought, at which a block ends that is not closed.
            calls_of: The calls that stand between the marks.
            end_of: Returns the end of the content by its own grammar, in which both marks may be part of an argument;
                None where it cannot be read.
        """
        begin = text.find(self._opening, at)
        if begin < 0:
            return None
        inside = begin + len(self._opening)
        end = end_of(text, inside)
        if end is not None and (closed := self._behind.match(text, end)) is not None:
            return _found(text, begin, closed.end(), calls_of(text[inside:end]))
        stop = len(text)
        for pattern in self._ends:
            found = pattern.search(text, inside)
            if found is not None and found["end"]:
                return _found(text, begin, found.end(), calls_of(text[inside : found.start()]))
            stop = len(text) if found is None else found.start()
        stop = min(stop, thought) if thought > begin else stop
        return _found(text, begin, stop, [BadCall("", f"the call is not closed by {self._closing}")])


def _found(text: str, begin: int, end: int, calls: list[Call]) -> Found:
    """Return found calls; a single unreadable one covers the whole text."""
    if len(calls) == 1 and isinstance(calls[0], BadCall):
        calls = [replace(calls[0], text=text[begin:end])]
    return Found(begin, end, tuple(calls))


class HermesParser(ScanningParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once or more: Qwen 2.5 and 3, Hermes, SmolLM3."""

    _BLOCKS = Blocks("<tool_call>", "</tool_call>")

    def _find(self, text: str, at: int, thought: int) -> Found | None:
        return self._BLOCKS.find(text, at, thought, lambda inside: [_call_of(inside)], json_end)


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

    def __init__(self, schemas: Sequence[Mapping[str, Any]] = ()) -> None:
        self._names = {schema["function"]["name"] for schema in schemas}

    def _find(self, text: str, at: int, thought: int) -> Found | None:
        place = at
        while (opened := self._OPENS.search(text, place)) is not None:
            begin = opened.start()
            first = not text[at:begin].strip()
            if opened[0] == self._TAG:
                return self._read(text, begin, opened.end(), thought)
            try:
                value, place = _decoded(text, begin)
            except UNREADABLE:
                place = begin + 1
                meant = self._meant_by_its_beginning(text, begin, first)
            else:
                meant = self._meant(value, first)
            if meant:
                return self._read(text, begin, begin, thought)
        return None

    def _read(self, text: str, begin: int, at: int, thought: int) -> Found:
        """Read every object from a place on. An unreadable one extends to the end of the text or the next thought."""
        calls: list[Call] = []
        while True:
            at = _behind_blanks(text, at)
            try:
                value, end = _decoded(text, at)
            except UNREADABLE as error:
                end = thought if thought > at else len(text)
                calls.append(BadCall(text[at:end], f"the call is no JSON: {error}"))
                return Found(begin, end, tuple(calls))
            calls.append(call_from(value, text[at:end]))
            at = _behind_blanks(text, end)
            at = _behind_blanks(text, at + 1) if text.startswith(";", at) else at
            if not text.startswith("{", at):
                return Found(begin, at if at == len(text) else end, tuple(calls))

    def _meant(self, value: Any, first: bool) -> bool:
        inner = value["function"] if isinstance(value.get("function"), dict) else value
        name = inner.get("name", inner.get("function"))
        known = isinstance(name, str) and name in self._names
        full = isinstance(name, str) and not inner.keys().isdisjoint(("parameters", "arguments"))
        return (known or full or value.get("type") == "function") if first else (known and full)

    def _meant_by_its_beginning(self, text: str, begin: int, first: bool) -> bool:
        found = self._CUT.match(text, begin)
        if found is None:
            return False
        known, full = found["name"] in self._names, found["arguments"] is not None
        return (known or full) if first else (known and full)


class MistralParser(ScanningParser):
    """``[TOOL_CALLS]`` before a JSON list of calls, or ``[TOOL_CALLS]name[ARGS]{...}`` for each: Mistral, Ministral.

    The second form may give an id, ``[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}``, or do without ``[ARGS]``.
    """

    _TAG = "[TOOL_CALLS]"
    _NAMED = re.compile(r"\s*(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[{]*)\s*)?(?:\[ARGS\])?")
    thoughts = Thoughts((THINK, BRACKETS))

    def _find(self, text: str, at: int, thought: int) -> Found | None:
        begin = text.find(self._TAG, at)
        if begin < 0:
            return None
        inside = begin + len(self._TAG)
        named = self._NAMED.match(text, inside)
        try:
            value, end = _decoded(text, _behind_blanks(text, named.end() if named else inside))
        except UNREADABLE as error:
            end = text.find(self._TAG, inside)
            end = min(len(text) if end < 0 else end, thought if thought > begin else len(text))
            why = f"the call is no JSON: {error}" if named else f"the calls are no JSON list: {error}"
            return Found(begin, end, (BadCall(text[begin:end], why),))
        written = text[begin:end]
        if named is not None:
            call: dict[str, Any] = {"name": named["name"], "arguments": value, "id": named["id"] or None}
            return Found(begin, end, (call_from(call, written),))
        calls = [call_from(each, written) for each in (value if isinstance(value, list) else [value])]
        return Found(begin, end, tuple(calls))


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

    def _find(self, text: str, at: int, thought: int) -> Found | None:
        first = self._behind_first_thoughts(text)  # the place that ^ matches: thoughts there are no content
        said, begin, end = text[first:], max(at - first, 0), max(thought - first, 0)
        found = self._next(said, begin, len(said))
        if found is not None and found.start() < end < found.end():
            found = self._next(said, begin, end) or found  # prefer a match that does not extend into a thought
        return None if found is None else Found(first + found.start(), first + found.end(), (self._call(found),))

    def _behind_first_thoughts(self, text: str) -> int:
        at = 0 if (close := self.thoughts.begun) is None else self.thoughts.end(text, 0, close)
        while (following := self.thoughts.next(text, at))[0] == at < len(text):
            at = following[1]
        return at

    def _next(self, text: str, begin: int, end: int) -> re.Match[str] | None:
        return next((found for found in self._pattern.finditer(text, begin, end) if found[0]), None)

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
    """A parser by the ``response_template`` that the tokenizer of a model may bring.

    The template itself separates thoughts from content. The ``response_schema`` of older tokenizers has no reader
    any more: transformers drops it when it loads one.

    Args:
        tokenizer: Tokenizer with such a template.
        schemas: Schemas of the tools, for the types of arguments that are written as text.
        begin: The rendered prompt that a response goes on from: a template may have begun it, with an open ``<think>``.
    """

    _CALLS = "tool_calls"

    def __init__(self, tokenizer: Any, schemas: Sequence[Mapping[str, Any]], begin: str) -> None:
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
            return self._apart(text, error)
        said = str(message.get("content") or "") if calls else text
        return ParsedTurn(said.strip(), tuple(map(_writable, calls)))

    def pieces(self, text: str) -> Iterator[Piece]:
        """Yield the response as one piece: its template does not say where its parts stand."""
        turn = self.parse(text)
        if text:
            yield Piece(text, "calls" if turn.calls else "said", turn.calls)

    def _apart(self, text: str, error: Exception) -> ParsedTurn:
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
        calls = [self._one(field, call) for call in message.get(self._CALLS) or ()] or [BadCall(text, why)]
        return ParsedTurn(str(message.get("content") or "").strip(), tuple(map(_writable, calls)))

    def _one(self, field: Mapping[str, Any], raw: Mapping[str, str]) -> Call:
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


def json_end(text: str, at: int) -> int | None:
    """Return the place after a JSON value; None where there is none."""
    try:
        return _decoded(text, _behind_blanks(text, at))[1]
    except UNREADABLE:
        return None


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """Return a JSON value, and the place after it. An error counts from its beginning."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(error.msg, text[at:], error.pos - at) from error


_BLANKS = re.compile(r"\s*")


def _behind_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None
    return found.end()


def _call_of(text: str) -> Call:
    try:
        value = json.loads(text)
    except UNREADABLE as error:
        return BadCall(text, f"the call is no JSON: {error}")
    return call_from(value, text)


_OF_A_CALL = frozenset(("name", "type", "id", "index", "function"))
"""Keys that a call has beside its arguments."""


def call_from(value: Any, text: str) -> Call:
    """Return a call from an object with a name and arguments; Llama calls these parameters, and they may be JSON text.

    Arguments that are null or an empty text are none, as models write them for a function that takes none.
    """
    if not isinstance(value, dict):
        return BadCall(text, f"a call is an object with name and arguments, not {excerpt(json.dumps(value), 40)}")
    value = value.get("function") if isinstance(value.get("function"), dict) else value
    name, given = value.get("name"), [value[key] for key in ("arguments", "parameters") if key in value]
    if not isinstance(name, str) or not name:
        return BadCall(text, "the call has no name")
    if not given and (other := value.keys() - _OF_A_CALL):
        return BadCall(text, f"the call has no arguments, and {', '.join(sorted(other))} beside its name")
    arguments = next((each for each in given if each is not None), None)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments.strip() or "null")
        except UNREADABLE as error:
            return BadCall(text, f"the arguments are no JSON: {error}")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return BadCall(text, f"the arguments are no object: {excerpt(json.dumps(arguments), 40)}")
    id_ = value.get("id")
    return ToolCall(name, arguments, id_ if isinstance(id_, str) else None)


def _writable(call: Call) -> Call:
    """Replace lone surrogates in a call, which JSON can spell and no file can hold."""
    if isinstance(call, BadCall):
        return call
    text = json.dumps([call.name, call.arguments], ensure_ascii=False)
    if text.isascii():
        return call
    name, arguments = json.loads(text.encode("utf-8", "replace"))
    return ToolCall(name, arguments, call.id)
