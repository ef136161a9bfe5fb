"""The base of parsers of tool calls: what a parser returns, how it goes through a text, and calls from JSON.

A parser never raises on what a model wrote. What looks like a call and is none becomes a `BadCall`, which says why:
the policy is answered that, and it is counted. The parsers themselves are in `tool_parsers`.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

from lit_rl.core.errors import excerpt
from lit_rl.environments.thoughts import Thoughts
from lit_rl.environments.tools import ToolCall

UNREADABLE = (ValueError, RecursionError)
"""Errors of reading: `RecursionError` comes of deeply nested lists."""


@dataclass(frozen=True)
class BadCall:
    """A call that cannot be read."""

    text: str
    why: str


AnyCall: TypeAlias = ToolCall | BadCall


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the policy, read."""

    content: str
    """The text beside the calls, without blanks around it."""
    calls: tuple[AnyCall, ...] = ()


@dataclass(frozen=True)
class TurnPiece:
    """A part of a response. All parts, in their order, are the response."""

    text: str
    kind: Literal["said", "thought", "calls"]
    calls: tuple[AnyCall, ...] = ()
    """The pieces, in the order in which they were written. A mark around calls is a piece without any."""


@dataclass(frozen=True)
class FoundCalls:
    """Calls that were found in a text."""

    begin: int
    end: int
    calls: tuple[AnyCall, ...]


class Parser(ABC):
    """A reader of calls in the text of a turn, control tokens included but for those that ended it."""

    thoughts = Thoughts()
    """Marks of thoughts, and whether a response begins in one. `parser_for` takes them from the chat template."""

    def parse(self, text: str) -> ParsedTurn:
        """Return the calls in the order in which they were written, and the other text."""
        pieces = list(self.pieces(text))
        calls = tuple(without_surrogates(call) for piece in pieces for call in piece.calls)
        return ParsedTurn(self._content([piece for piece in pieces if piece.kind != "calls"]).strip(), calls)

    @abstractmethod
    def pieces(self, text: str) -> Iterator[TurnPiece]:
        """Yield the thoughts, the calls and what else is said."""

    def _content(self, pieces: Sequence[TurnPiece]) -> str:
        """Return the content of the message, made of what is no call."""
        return "".join(piece.text for piece in pieces)


class ScanningParser(Parser):
    """A parser that goes from left to right.

    What opens first, a thought or a call, ends where it ends: a call in a thought is none, and a mark of thoughts in
    the arguments of a call is a part of them. Fences of code mean nothing to it.
    """

    def pieces(self, text: str) -> Iterator[TurnPiece]:
        """Yield thoughts, calls and other text."""
        at = 0
        if text and (close := self.thoughts.begun) is not None:
            at = self.thoughts.end(text, 0, close)
            yield TurnPiece(text[:at], "thought")
        while at < len(text):
            thought, behind = self.thoughts.next(text, at)
            found = self._find(text, at, thought)
            begin = thought if found is None else min(thought, found.begin)
            if at < begin:
                yield TurnPiece(text[at:begin], "said")
            at = begin
            if found is not None and found.begin == begin:
                yield TurnPiece(text[begin : found.end], "calls", found.calls)
                at = found.end
            elif begin < len(text):
                yield TurnPiece(text[begin:behind], "thought")
                at = behind

    @abstractmethod
    def _find(self, text: str, at: int, thought: int) -> FoundCalls | None:
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
        calls_of: Callable[[str], list[AnyCall]],
        end_of: Callable[[str, int], int | None],
    ) -> FoundCalls | None:
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


def _found(text: str, begin: int, end: int, calls: list[AnyCall]) -> FoundCalls:
    """Return found calls; a single unreadable one covers the whole text."""
    if len(calls) == 1 and isinstance(calls[0], BadCall):
        calls = [replace(calls[0], text=text[begin:end])]
    return FoundCalls(begin, end, tuple(calls))


class BlockParser(ScanningParser, ABC):
    """A parser of calls that stand between an opening and a closing mark."""

    _BLOCKS: ClassVar[Blocks]

    def _find(self, text: str, at: int, thought: int) -> FoundCalls | None:
        return self._BLOCKS.find(text, at, thought, self._calls, self._end)

    @abstractmethod
    def _calls(self, inside: str) -> list[AnyCall]:
        """Return the calls of a block."""

    @abstractmethod
    def _end(self, text: str, at: int) -> int | None:
        """Return the end of a block's content by its grammar; None where it cannot be read. See `Blocks.find`."""


def json_end(text: str, at: int) -> int | None:
    """Return the place after a JSON value; None where there is none."""
    try:
        return decode_json(text, place_after(BLANKS, text, at))[1]
    except UNREADABLE:
        return None


def decode_json(text: str, at: int) -> tuple[Any, int]:
    """Return a JSON value, and the place after it. An error counts from its beginning."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(error.msg, text[at:], error.pos - at) from error


BLANKS = re.compile(r"\s*")
"""Pattern of any white space, none included."""


def place_after(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the place after what a pattern matches at a place of a text.

    Raises:
        ValueError: it matches nothing there.
    """
    found = pattern.match(text, at)
    if found is None:
        raise ValueError(f"something else stands at {text[at : at + 20]!r}")
    return found.end()


_CALL_KEYS = frozenset(("name", "type", "id", "index", "function"))
"""Keys that a call has beside its arguments."""


def call_from(value: Any, text: str) -> AnyCall:
    """Return a call from an object with a name and arguments; Llama calls these parameters, and they may be JSON text.

    Arguments that are null or an empty text are none, as models write them for a function that takes none.
    """
    if not isinstance(value, dict):
        return BadCall(text, f"a call is an object with name and arguments, not {excerpt(json.dumps(value), 40)}")
    value = value.get("function") if isinstance(value.get("function"), dict) else value
    name, candidates = value.get("name"), [value[key] for key in ("arguments", "parameters") if key in value]
    if not isinstance(name, str) or not name:
        return BadCall(text, "the call has no name")
    if not candidates and (other := value.keys() - _CALL_KEYS):
        return BadCall(text, f"the call has no arguments, and {', '.join(sorted(other))} beside its name")
    arguments = next((each for each in candidates if each is not None), None)
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


def named_call(name: str, arguments: str, text: str) -> AnyCall:
    """Return a call of a name with arguments that are JSON.

    Args:
        name: Name of the tool.
        arguments: A JSON object, as text.
        text: The whole text of the call, for errors.
    """
    try:
        read = json.loads(arguments)
    except UNREADABLE as error:
        return BadCall(text, f"the arguments are no JSON: {error}")
    return call_from({"name": name, "arguments": read}, text)


def without_surrogates(call: AnyCall) -> AnyCall:
    """Replace lone surrogates in a call, which JSON can spell and no file can hold."""
    if isinstance(call, BadCall):
        return call
    text = json.dumps([call.name, call.arguments], ensure_ascii=False)
    if text.isascii():
        return call
    name, arguments = json.loads(text.encode("utf-8", "replace"))
    return ToolCall(name, arguments, call.id)
