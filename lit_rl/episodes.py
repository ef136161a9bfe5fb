"""An episode: one conversation between the policy and what answers it, as it went, in plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Message = dict[str, Any]
"""One chat message: at least ``role`` and ``content``."""

Prompt = str | list[Message]
"""A prompt as the data set has it: plain text, or a list of chat messages."""

End = Literal["answered", "done", "max_turns", "max_tokens", "cut", "timeout", "failed"]
"""Why an episode is over: the policy gave an answer that calls no tool (answered); the environment said so (done); a
limit of turns, of tokens, or of one turn's tokens or the environment's own (cut) was met; time was up; it raised."""

TOKENS = "tokens/"
"""How the columns of a table begin that hold an episode's tokens."""

RETURNED_IMAGES = "returned_images"
"""The column of what tools and environments showed in an episode, where they showed anything."""


@dataclass(frozen=True)
class Episode:
    """One conversation. Reward functions get its fields as a dict, tables and records as columns."""

    prompt: str | list[dict[str, Any]]
    """What the policy read before its first turn, with what the environment opened with."""
    messages: list[dict[str, Any]]
    """What came after it: the policy's turns (role ``assistant``) and their answers (``tool`` or ``user``)."""
    end: End
    turns: int
    """Turns of the policy."""
    turn_rewards: list[float | None] = field(default_factory=list)
    """What the environment gave for each turn; None where it gave nothing."""
    reward: float | None = None
    """What the environment gave for the whole: its ``get_reward()``, else the sum over its turns; None: nothing."""
    calls: int = 0
    """Calls of tools, those that could not be read included."""
    failed_calls: int = 0
    """Of these, those that were answered with an error."""
    unreadable_calls: int = 0
    """Of these, those that could not be read."""
    observed_tokens: int = 0
    """Tokens that the policy read between its turns."""
    seconds: float = 0.0
    """That the environment took."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What a rollout function gave for rewards, by name: the same names in every episode of a rollout."""
    error: str | None = None
    """What went wrong where ``end`` is ``failed`` or ``timeout``."""

    @property
    def failed(self) -> bool:
        """Whether it ended by no fault of the policy: it is neither scored nor learned from."""
        return self.end in ("failed", "timeout")

    @property
    def cut(self) -> bool:
        """Whether a limit of turns or tokens ended it."""
        return self.end in ("max_turns", "max_tokens", "cut")

    def plain(self) -> dict[str, Any]:
        """The fields as a dict that shares its values with the episode."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def transcript(self) -> str:
        """The messages as a text for people: each with its author, calls as ``name(argument=value)``."""
        return transcript_of(self.messages)


def transcript_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages as a text for people, see `Episode.transcript`."""
    return "\n".join(f"{message['role']}: {words_of(message)}" for message in messages)


def words_of(message: Mapping[str, Any]) -> str:
    """What a message says, its calls as ``name(argument=value)``."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    written = [_call(call["function"]) for call in calls]
    return " ".join(part for part in (_said(message.get("content")), *written) if part)


def _said(content: Any) -> str:
    """The words of a message, with the names of its images where they stand."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(f"[image {part.get('image', '')}]" if "text" not in part else part["text"] for part in content)


def _call(function: Mapping[str, Any]) -> str:
    return f"{function['name']}({', '.join(f'{name}={value!r}' for name, value in function['arguments'].items())})"
