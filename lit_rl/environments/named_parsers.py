"""Calls that are a name and then arguments as JSON: gpt-oss, DeepSeek V3."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from lit_rl.environments.channels import MESSAGE, ChannelMessage, channel_messages, said_and_thought
from lit_rl.environments.parsers import (
    UNREADABLE,
    BadCall,
    Blocks,
    Call,
    Found,
    Parser,
    Piece,
    ScanningParser,
    call_from,
    json_end,
)


class GptOssParser(Parser):
    """Messages of the assistant on channels: one that is addressed to a tool is a call. gpt-oss.

    ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}``, with the address on either side of
    the channel. A message ends by ``<|end|>`` or ``<|call|>``, or with the turn. What is thought (on the channel
    analysis) is no content.
    """

    _ADDRESS = re.compile(r"\bto=(?:functions\.)?(?P<name>[^\s<]+)")
    _ENDS = re.compile(r"<\|(?:end|call|return)\|>\s*$")

    def pieces(self, text: str) -> Iterator[Piece]:
        for message in channel_messages(text):
            address = self._ADDRESS.search(message.header)
            if address is None:
                yield Piece(message.written, "thought" if message.thought else "said")
            else:
                yield Piece(message.written, "calls", (self._call(address["name"], message),))

    def _call(self, name: str, message: ChannelMessage) -> Call:
        if message.body is None:
            return BadCall(message.written, f"no {MESSAGE} stands behind the name")
        arguments = self._ENDS.sub("", message.body)
        ended = arguments != message.body
        return named_call(name, arguments.strip() or ("{}" if ended else ""), message.written)

    def _content(self, pieces: Sequence[Piece]) -> str:
        return said_and_thought(super()._content(pieces))[0]


class DeepSeekV3Parser(ScanningParser):
    """``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` before a block of JSON: DeepSeek V3."""

    _BLOCKS = Blocks("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    _HEAD = re.compile(r"[^<]*<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n")
    _CALL = re.compile(rf"{_HEAD.pattern}(?P<arguments>.*)\n```\s*", re.DOTALL)
    _FENCE = re.compile(r"\s*\n```")
    _AROUND = re.compile(r"\s*<｜tool▁calls▁(?:(?P<begin>begin)|end)｜>\s*")

    def _find(self, text: str, at: int, thought: int) -> Found | None:
        found, around = self._BLOCKS.find(text, at, thought, self._call, self._end), self._AROUND.search(text, at)
        if around is None or (found is not None and found.begin < around.start()):
            return found
        begin, end = around.span()
        if around["begin"] and (found is None or found.begin != end):
            end = thought if thought > begin else len(text)
            return Found(begin, end, (BadCall(text[begin:end], f"no call stands behind {around[0].strip()}"),))
        return Found(begin, end, ())

    def _end(self, text: str, at: int) -> int | None:
        head = self._HEAD.match(text, at)
        value = None if head is None else json_end(text, head.end())
        fence = None if value is None else self._FENCE.match(text, value)
        return None if fence is None else fence.end()

    def _call(self, inside: str) -> list[Call]:
        found = self._CALL.fullmatch(inside)
        if found is None:
            return [BadCall(inside, "a call is function<｜tool▁sep｜>NAME, and a block of ```json on the next line")]
        return [named_call(found["name"].strip(), found["arguments"], inside)]


def named_call(name: str, arguments: str, text: str) -> Call:
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
