"""Thoughts in what a model writes: between marks, or on a channel of their own.

Most families think between marks such as ``<think>`` and ``</think>``, and a chat template may open a thought before
the model writes a word. gpt-oss writes messages on channels (the harmony format):

    <|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>

analysis is thought; final and commentary are content, the latter before calls. Decoded without special tokens this
is ``analysisTHOUGHTSassistantfinalTEXT``, so it is parsed with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lit_rl.core.chat_template import apply_chat_template
from lit_rl.core.errors import ConfigError
from lit_rl.data.rendering import control_tokens

Marks = tuple[str, str]
"""The opening and the closing mark of a thought."""

THINK: Marks = ("<think>", "</think>")
"""Marks of most families. Models that have none of their own are taught these, so that every parser knows them."""
CHANNEL: Marks = ("<|channel>thought", "<channel|>")
"""Marks of Gemma 4."""
BRACKETS: Marks = ("[THINK]", "[/THINK]")
"""Marks of Magistral."""

KNOWN_MARKS: tuple[Marks, ...] = (
    THINK,
    CHANNEL,
    BRACKETS,
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""Marks of all families, except those that write on channels."""
_TAG = re.compile(r"<(?P<name>(?:\w+:)?(?:think(?:ing)?|thoughts?|reason(?:ing)?|scratchpad))>")
"""Other families have a tag of another name: <seed:think>, <thought>, <reasoning>."""
_ASKED = "qqaskedqq"


@dataclass(frozen=True)
class Thoughts:
    """Marks that separate thoughts from content.

    A thought goes from an opening mark to the first closing mark of its kind behind it, or to the end of the text: a
    mark that opens another one inside it is a part of it.

    Args:
        marks: Pairs of an opening and a closing mark.
        begun: The closing mark of the thought that a response begins in; None: it begins with content.
    """

    marks: tuple[Marks, ...] = (THINK,)
    begun: str | None = None

    def of(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None) -> Thoughts:
        """Return these with the marks of a chat template, and begun where its generation prompt leaves one open.

        Args:
            tokenizer: Tokenizer of the policy; one without a chat template adds nothing.
            template_kwargs: Arguments that prompts are rendered with; None: prompts are plain texts, which begin no
                thought.
        """
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            return self
        begin = "" if template_kwargs is None else generation_prompt(tokenizer, template_kwargs).rpartition(_ASKED)[2]
        known = f"{template}{begin}"
        tags = ((found[0], f"</{found['name']}>") for found in _TAG.finditer(known))
        marks = dict.fromkeys((*self.marks, *(pair for pair in KNOWN_MARKS if pair[0] in known), *tags))
        found = replace(self, marks=tuple(marks))
        at, begun = 0, None
        while begun is None and (opened := found._next_opened(begin, at)) is not None:
            _, inside, close = opened
            begun = close if begin.find(close, inside) < 0 else None
            at = found.end(begin, inside, close)
        return replace(found, begun=begun)

    def next(self, text: str, at: int) -> tuple[int, int]:
        """Return where the next thought begins and ends; twice the end of the text where there is none."""
        opened = self._next_opened(text, at)
        if opened is None:
            return len(text), len(text)
        return opened[0], self.end(text, opened[1], opened[2])

    def end(self, text: str, at: int, close: str) -> int:
        """Return the place after a thought that goes on at a place of a text."""
        found = text.find(close, at)
        return len(text) if found < 0 else found + len(close)

    def going_on(self, turn: str) -> str:
        """Return a turn that continues a prompt, with the thought that was begun there closed first."""
        return turn if self.begun is None else f"{self.begun}{turn}"

    def _next_opened(self, text: str, at: int) -> tuple[int, int, str] | None:
        """Return where the next opening mark begins and ends, and what closes it."""
        places = [(text.find(open_, at), open_, close) for open_, close in self.marks]
        opened = [(place, place + len(open_), close) for place, open_, close in places if place >= 0]
        return min(opened, default=None)


def generation_prompt(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> str:
    """Return a rendered question up to the generation prompt; empty where there is no template, or it cannot render it.

    Args:
        tokenizer: Tokenizer of the policy.
        template_kwargs: Arguments that prompts are rendered with.
    """
    if not tokenizer.chat_template:
        return ""
    how = {**template_kwargs, "tokenize": False, "add_generation_prompt": True}
    try:
        return str(apply_chat_template(tokenizer, [{"role": "user", "content": _ASKED}], **how))
    except ConfigError:
        raise
    except Exception:  # a template may raise anything; rendering is checked elsewhere
        return ""


START_TOKEN = "<|start|>"
CHANNEL_TOKEN = "<|channel|>"
MESSAGE_TOKEN = "<|message|>"

_BORDER = re.compile(rf"(?={re.escape(START_TOKEN)})|(?<=<\|end\|>)(?={re.escape(CHANNEL_TOKEN)})")
_NAME = re.compile(rf"{re.escape(CHANNEL_TOKEN)}\s*(?P<name>\w*)")
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
    return {START_TOKEN, CHANNEL_TOKEN, MESSAGE_TOKEN} <= {*control_tokens(tokenizer)}


def channel_messages(written: str) -> Iterator[ChannelMessage]:
    """Yield the messages of a turn, in their order. Text before any channel has no header."""
    for part in _BORDER.split(written):
        header, opened, body = part.partition(MESSAGE_TOKEN)
        if opened:
            yield ChannelMessage(part, header, body)
        elif CHANNEL_TOKEN in part or part.startswith(START_TOKEN):
            yield ChannelMessage(part, part, None)
        elif part:
            yield ChannelMessage(part, "", part)


def split_thoughts(written: str) -> tuple[str, str]:
    """Split a turn into content and thoughts, each without blanks around it.

    Args:
        written: The turn with its control tokens.
    """
    content, thought = list[str](), list[str]()
    for message in channel_messages(written):
        (thought if message.thought else content).append(message.text.strip())
    return "\n".join(filter(None, content)), "\n".join(filter(None, thought))
