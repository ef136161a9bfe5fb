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
"""The reason why an episode is over: the policy answered without calling a tool (answered); the environment ended it
(done); a limit of turns, of tokens, of one turn's tokens or of the environment (cut) was met; time was up; it
raised."""

TOKENS = "tokens/"
"""The prefix of the table columns that hold an episode's tokens."""

RETURNED_IMAGES = "returned_images"
"""The column of images that tools and environments returned in an episode, if any."""


@dataclass(frozen=True)
class Episode:
    """One conversation. Reward functions get its fields as a dict, tables and records as columns."""

    prompt: str | list[dict[str, Any]]
    """The policy's input before its first turn, including the environment's opening."""
    messages: list[dict[str, Any]]
    """The messages after the prompt: the policy's turns (role ``assistant``) and their answers (``tool`` or
    ``user``)."""
    end: End
    turns: int
    """Turns of the policy."""
    turn_rewards: list[float | None] = field(default_factory=list)
    """The environment's reward for each turn; None where there is none."""
    reward: float | None = None
    """The environment's reward for the whole episode: its ``get_reward()``, else the sum over its turns; None if
    there is none."""
    calls: int = 0
    """Calls of tools, those that could not be read included."""
    failed_calls: int = 0
    """The number of calls that were answered with an error."""
    unreadable_calls: int = 0
    """The number of calls that could not be read."""
    observed_tokens: int = 0
    """Tokens that the policy read between its turns."""
    seconds: float = 0.0
    """That the environment took."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Values of a rollout function for rewards, by name: the same names in every episode of a rollout."""
    error: str | None = None
    """The error where ``end`` is ``failed`` or ``timeout``."""

    @property
    def failed(self) -> bool:
        """True if it ended by no fault of the policy: it is neither scored nor learned from."""
        return self.end in ("failed", "timeout")

    @property
    def cut(self) -> bool:
        """True if a limit of turns or tokens ended it."""
        return self.end in ("max_turns", "max_tokens", "cut")

    def plain(self) -> dict[str, Any]:
        """Return the fields as a dict that shares its values with the episode."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def transcript(self) -> str:
        """Return the messages as readable text: each with its author, calls as ``name(argument=value)``."""
        return transcript_of(self.messages)


def transcript_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return messages as readable text, see `Episode.transcript`."""
    return "\n".join(f"{message['role']}: {words_of(message)}" for message in messages)


def words_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with its calls as ``name(argument=value)``."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    written = [_call(call["function"]) for call in calls]
    return " ".join(part for part in (_said(message.get("content")), *written) if part)


def _said(content: Any) -> str:
    """Return the text of a content, with the names of its images in place."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(f"[image {part.get('image', '')}]" if "text" not in part else part["text"] for part in content)


def _call(function: Mapping[str, Any]) -> str:
    return f"{function['name']}({', '.join(f'{name}={value!r}' for name, value in function['arguments'].items())})"
