"""What a model says on channels, as gpt-oss does: its thoughts on one, what others are to read on another.

    <|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>

Decoded without special tokens this is ``analysisTHOUGHTSassistantfinalTEXT``, which is nothing that anybody said. The
format (harmony) has three channels: analysis is thought; final and commentary are said, the latter before calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lit_rl.data.templates import control_tokens

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"

_BORDER = re.compile(rf"(?={re.escape(START)})|(?<=<\|end\|>)(?={re.escape(CHANNEL)})")
_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*(?P<name>\w*)")
_CONTROL = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return|endoftext)\|>")
_THOUGHT = "analysis"


@dataclass(frozen=True)
class ChannelMessage:
    """One message of a turn."""

    written: str
    """All of it."""
    header: str
    """The text before its body: sender, recipient and channel. Empty where it has none."""
    body: str | None
    """Its text as it was written; None: it was cut before one began."""

    @property
    def thought(self) -> bool:
        """True if this message is on the private analysis channel."""
        found = _NAME.search(self.header)
        return found is not None and found["name"] == _THOUGHT

    @property
    def text(self) -> str:
        """Its text without control tokens."""
        return _CONTROL.sub("", self.body or "")


def speaks_on_channels(tokenizer: Any) -> bool:
    """Tell whether a tokenizer has the control tokens of channels, so that its model writes on them."""
    return {START, CHANNEL, MESSAGE} <= {*control_tokens(tokenizer)}


def channel_messages(written: str) -> Iterator[ChannelMessage]:
    """Yield the messages of a turn, in their order. Text before any channel has no header."""
    for part in _BORDER.split(written):
        header, opened, body = part.partition(MESSAGE)
        if opened:
            yield ChannelMessage(part, header, body)
        elif CHANNEL in part or part.startswith(START):
            yield ChannelMessage(part, part, None)
        elif part:
            yield ChannelMessage(part, "", part)


def said_and_thought(written: str) -> tuple[str, str]:
    """Split a turn into content and thoughts, each without blanks around it.

    Args:
        written: The turn with its control tokens.
    """
    said, thought = list[str](), list[str]()
    for message in channel_messages(written):
        (thought if message.thought else said).append(message.text.strip())
    return "\n".join(filter(None, said)), "\n".join(filter(None, thought))
