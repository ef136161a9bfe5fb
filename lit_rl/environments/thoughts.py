"""The marks between which a model thinks, and whether its chat template has begun a thought before it writes a word."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lit_rl.chat_template import apply_chat_template
from lit_rl.errors import ConfigError

Marks = tuple[str, str]
"""The opening and the closing mark of a thought."""

THINK: Marks = ("<think>", "</think>")
"""Marks of most families. Models that have none of their own are taught these, so that every parser knows them."""
CHANNEL: Marks = ("<|channel>thought", "<channel|>")
"""Marks of Gemma 4."""
BRACKETS: Marks = ("[THINK]", "[/THINK]")
"""Marks of Magistral."""

KNOWN: tuple[Marks, ...] = (
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
        marks = dict.fromkeys((*self.marks, *(pair for pair in KNOWN if pair[0] in known), *tags))
        found = replace(self, marks=tuple(marks))
        return replace(found, begun=found._left_open(begin))

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
        there = [(place, place + len(open_), close) for place, open_, close in places if place >= 0]
        return min(there, default=None)

    def _left_open(self, begin: str) -> str | None:
        at = 0
        while (opened := self._next_opened(begin, at)) is not None:
            close = opened[2]
            if begin.find(close, opened[1]) < 0:
                return close
            at = self.end(begin, opened[1], close)
        return None


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
