"""Calls whose arguments are written like Python's or like JSON without its quotes: LFM 2, Gemma 4."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lit_rl.environments.parsers import UNREADABLE, BadCall, Blocks, Call, Found, ScanningParser
from lit_rl.environments.thoughts import CHANNEL, THINK, Thoughts
from lit_rl.environments.tools import ToolCall

T = TypeVar("T")


class Lfm2Parser(ScanningParser):
    """``<|tool_call_start|>[name(key='text', other=3), name()]<|tool_call_end|>``: LFM 2 and 2.5."""

    _BLOCKS = Blocks("<|tool_call_start|>", "<|tool_call_end|>")
    _OPEN, _NAME = re.compile(r"\s*\["), re.compile(r"\s*(?P<name>[^\s(,\[\]'\"]+)\(")

    def _find(self, text: str, at: int, thought: int) -> Found | None:
        return self._BLOCKS.find(text, at, thought, self._listed, lambda text, at: _end(self._list, text, at))

    def _listed(self, inside: str) -> list[Call]:
        try:
            calls, end = self._list(inside, 0)
            _nothing_behind(inside, end)
        except UNREADABLE as error:
            return [BadCall(inside, f"the calls are no list like [name(key=1), name(key='text')]: {error}")]
        return list(calls)

    def _list(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        return _sequence(text, _behind(self._OPEN, text, at), "]", self._call)

    def _call(self, text: str, at: int) -> tuple[ToolCall, int]:
        end = _behind(self._NAME, text, at)
        pairs, closed = _sequence(text, end, ")", lambda text, at: _PYTHON.pair(text, at, _EQUALS))
        return ToolCall(text[at : end - 1].strip(), dict(pairs)), closed


class Gemma4Parser(ScanningParser):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:3}<tool_call|>``: Gemma 4, DiffusionGemma."""

    thoughts = Thoughts((THINK, CHANNEL))
    _BLOCKS = Blocks("<|tool_call>", "<tool_call|>")
    _NAME = re.compile(r"\s*call:(?P<name>[^\s{]+)\{")

    def _find(self, text: str, at: int, thought: int) -> Found | None:
        return self._BLOCKS.find(text, at, thought, self._calls, lambda text, at: _end(self._named, text, at))

    def _calls(self, inside: str) -> list[Call]:
        try:
            call, end = self._named(inside, 0)
            _nothing_behind(inside, end)
        except UNREADABLE as error:
            return [BadCall(inside, f'a call is call:name{{key:<|"|>text<|"|>,other:3}}: {error}')]
        return [call]

    def _named(self, text: str, at: int) -> tuple[ToolCall, int]:
        end = _behind(self._NAME, text, at)
        pairs, closed = _sequence(text, end, "}", lambda text, at: _GEMMA.pair(text, at, _COLON))
        return ToolCall(text[at:end].strip()[len("call:") : -1], dict(pairs)), closed


def _end(read: Callable[[str, int], tuple[Any, int]], text: str, at: int) -> int | None:
    """Return the place after what a reader reads; None where it cannot."""
    try:
        return read(text, at)[1]
    except UNREADABLE:
        return None


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
        at = _behind(_BLANK, text, at)
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
            return _WORDS[found[0]], found.end()
        raise ValueError(f"no value at {text[at : at + 20]!r}")

    def pair(
        self, text: str, at: int, assigned: tuple[re.Pattern[str], re.Pattern[str]]
    ) -> tuple[tuple[str, Any], int]:
        """Return a key and its value, and the place after them. The key may go without quotes."""
        bare, assign = assigned
        at = _behind(_BLANK, text, at)
        if (found := self.quoted.match(text, at)) is not None:
            key, at = self.unescaped(found[found.lastindex or 0]), found.end()
        else:
            end = _behind(bare, text, at)
            key, at = text[at:end].strip(), end
        value, at = self.value(text, _behind(assign, text, at))
        return (key, value), at


_BLANK, _COMMA = re.compile(r"\s*"), re.compile(r"\s*,")
_COLON = (re.compile(r"[^:,{}\[\]]+"), re.compile(r"\s*:"))
_EQUALS = (re.compile(r"[^=,()\[\]{}'\"]+"), re.compile(r"\s*="))
_NUMBER = re.compile(r"-?\d+(?P<broken>(?:\.\d*)?(?:[eE][+-]?\d+)?)")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_WORD = re.compile(r"(?:true|True|false|False|null|None)\b")
_ESCAPE = re.compile(r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<c>.))", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""} | {
    same: same for same in "\\'\"/"
}


def _sequence(text: str, at: int, close: str, one: Callable[[str, int], tuple[T, int]]) -> tuple[list[T], int]:
    """Return the items between commas up to a bracket, and the place after it."""
    found: list[T] = []
    at = _behind(_BLANK, text, at)
    while not text.startswith(close, at):
        item, at = one(text, _behind(_COMMA, text, at) if found else at)
        found.append(item)
        at = _behind(_BLANK, text, at)
    return found, at + len(close)


def _behind(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    if found is None:
        raise ValueError(f"something else stands at {text[at : at + 20]!r}")
    return found.end()


def _nothing_behind(text: str, at: int) -> None:
    if text[at:].strip():
        raise ValueError(f"the call ends before {text[at : at + 20]!r}")


def _pythonic(inside: str) -> str:
    text = _ESCAPE.sub(_unescaped, inside)
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unescaped(found: re.Match[str]) -> str:
    if (character := found["c"]) is not None:
        return _ESCAPED.get(character, found[0])
    code = int(found["x"] or found["u"] or found["U"], 16)
    return chr(code) if code <= 0x10FFFF else found[0]


_PYTHON = _Literals(re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL), _pythonic)
_GEMMA = _Literals(re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL), str)
