"""Episodes as tables show them: the messages with their authors, and which turns are in the loss."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lit_rl.episodes import transcript_of, words_of

MOST = 12
"""Most messages of an episode that are shown, the first and the last half of them."""

STYLES = {"assistant": "cyan", "tool": "magenta", "user": "yellow"}
"""Colours by author; others have none."""


class Line(NamedTuple):
    """A message with its author, its text, and the colour of both."""

    author: str
    words: str
    style: str


@dataclass(frozen=True)
class Conversation:
    """The messages of an episode, with a flag for each turn in the loss."""

    messages: Sequence[Mapping[str, Any]]
    learned: Sequence[bool]
    """Whether each turn of the policy is in the loss."""

    def __str__(self) -> str:
        return transcript_of(self.messages)

    def lines(self) -> list[Line]:
        """Return a line for each message, dim where it is not learned from, and marked so where the policy wrote it."""
        lines = list(self._lines())
        if len(lines) <= MOST:
            return lines
        left_out = Line("...", f"{len(lines) - MOST} messages more", "dim")
        return [*lines[: MOST // 2], left_out, *lines[-MOST // 2 :]]

    def _lines(self) -> Iterator[Line]:
        turns = iter(self.learned)
        for message in self.messages:
            role = str(message["role"])
            style, of_policy = STYLES.get(role, ""), role == "assistant"
            if of_policy and next(turns, True):
                yield Line(role, words_of(message), style)
            else:
                author = f"{role} (not learned)" if of_policy else role
                yield Line(author, words_of(message), f"dim {style}".strip())


def conversation_of(table: Mapping[str, Sequence[Any]], row: int) -> Conversation:
    """Return the episode in a row of a table of samples, with its turns in the loss."""
    turn, learned = table["tokens/turn"][row], table["tokens/learned"][row]
    return Conversation(
        json.loads(table["messages"][row]), [bool(learned[turn == i].any()) for i in range(table["turns"][row])]
    )
