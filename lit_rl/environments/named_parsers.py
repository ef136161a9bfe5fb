"""Calls that are a name and then arguments as JSON: gpt-oss, DeepSeek V3."""

from __future__ import annotations

import json
import re

from lit_rl.environments.channels import MESSAGE, channel_messages, said_and_thought
from lit_rl.environments.parsers import UNREADABLE, BadCall, Blocks, Call, Parser, call_from


class GptOssParser(Parser):
    """Messages of the assistant on channels: one that is addressed to a tool is a call. gpt-oss.

    ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}``, with the address on either side of
    the channel. A message ends by ``<|end|>`` or ``<|call|>``, or with the turn. What is thought (on the channel
    analysis) is no content.
    """

    _ADDRESS = re.compile(r"\bto=(?:functions\.)?(?P<name>[^\s<]+)")
    _ENDS = re.compile(r"<\|(?:end|call|return)\|>\s*$")

    def _calls(self, said: str) -> tuple[list[Call], str]:
        calls: list[Call] = []
        rest: list[str] = []
        for message in channel_messages(said):
            address = self._ADDRESS.search(message.header)
            if address is None:
                rest.append(message.written)
            elif message.body is None:
                calls.append(BadCall(message.written, f"no {MESSAGE} stands behind the name"))
            else:
                calls.append(named_call(address["name"], self._ENDS.sub("", message.body), message.written))
        return calls, said_and_thought("".join(rest))[0]


class DeepSeekV3Parser(Parser):
    """``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` before a block of JSON: DeepSeek V3."""

    _BLOCKS = Blocks("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    _CALL = re.compile(r"[^<]*<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?P<arguments>.*)\n```\s*", re.DOTALL)
    _AROUND = re.compile(r"<｜tool▁calls▁(?:begin|end)｜>")

    def _calls(self, said: str) -> tuple[list[Call], str]:
        calls, rest = self._BLOCKS.read(said, self._call)
        if not calls and self._AROUND.search(rest):
            return [BadCall(rest, "no call stands behind <｜tool▁calls▁begin｜>")], ""
        return calls, self._AROUND.sub("", rest) if calls else rest

    def _call(self, inside: str) -> list[Call]:
        found = self._CALL.fullmatch(inside)
        if found is None:
            return [BadCall(inside, "a call is function<｜tool▁sep｜>NAME, and a block of ```json on the next line")]
        return [named_call(found["name"].strip(), found["arguments"], inside)]


def named_call(name: str, arguments: str, text: str) -> Call:
    """A call of a name with arguments that are JSON.

    Args:
        name: Of the tool.
        arguments: A JSON object, as text.
        text: All that was written of the call, for what is wrong with it.
    """
    try:
        read = json.loads(arguments)
    except UNREADABLE as error:
        return BadCall(text, f"the arguments are no JSON: {error}")
    return call_from({"name": name, "arguments": read}, text)
