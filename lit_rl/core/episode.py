"""Conversations between the policy and an environment: in plain data once over, in tokens while they go on.

One call of ``Generator.generate`` holds whole conversations. Whenever a row has finished a turn, the generator
passes it to the responder (`PolicyTurn`) and goes on with other rows; the responder answers when it can
(`EnvironmentTurn`), in any order. A turn of the policy is never decoded and encoded again, and a generator
handles nothing but tokens. An `Episode` is the finished conversation as messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lit_rl.core.vision_inputs import Later


Message = dict[str, Any]
"""One chat message: at least ``role`` and ``content``."""

Prompt = str | list[Message]
"""A prompt as the data set has it: plain text, or a list of chat messages."""

End = Literal["answered", "done", "max_turns", "max_tokens", "max_branches", "cut", "timeout", "failed"]
"""The reason why an episode is over: the policy answered without calling a tool (answered); the environment ended it
(done); a limit of turns, of tokens, of branches, of one turn's tokens or of the environment (cut) was met; time was up;
it raised."""

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
    """Seconds that the environment took."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Values of a rollout function for rewards, by name: the same names in every episode of a rollout."""
    error: str | None = None
    """The error where ``end`` is ``failed`` or ``timeout``."""
    environment: Any = field(default=None, repr=False, compare=False)
    """The user's object that answered, closed by now, where reward functions name ``environments``; else None. It is
    no part of what is written down."""
    branches: int | None = None
    """Texts that the policy read and wrote. None where its settings allow a single one."""
    read_again: int = 0
    """Tokens that several branches have, counted once for each branch beyond the first."""
    forks: list[list[int | None]] = field(default_factory=list)
    """The turns that do not go on from the turn before them: pairs of a turn and the one whose text it goes on from; -1
    is the prompt, and None a new beginning."""

    @property
    def failed(self) -> bool:
        """True if it ended by no fault of the policy: it is neither scored nor learned from."""
        return self.end in ("failed", "timeout")

    @property
    def cut(self) -> bool:
        """True if a limit of turns or tokens ended it."""
        return self.end in ("max_turns", "max_tokens", "max_branches", "cut")

    def plain(self) -> dict[str, Any]:
        """Return the fields as a dict that shares its values with the episode, without the environment."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "environment"}

    def transcript(self) -> str:
        """Return the messages as readable text: each with its author, calls as ``name(argument=value)``."""
        return transcript_of(self.messages, self.forks)


def transcript_of(messages: Sequence[Mapping[str, Any]], forks: Sequence[Sequence[int | None]] = ()) -> str:
    """Return messages as readable text, see `Episode.transcript`; a line tells where the policy read another text."""
    lines, turns, origins = list[str](), 0, fork_lines(forks)
    for message in messages:
        if line := origins.pop(turns, None):
            lines.append(f"(turn {turns} {line})")
        lines.append(f"{message['role']}: {message_text(message)}")
        turns += message["role"] == "assistant"
    return "\n".join(lines)


def fork_lines(forks: Sequence[Sequence[int | None]]) -> dict[int, str]:
    """Return what is said of each turn of `Episode.forks`."""
    origins = {None: "begins another text", -1: "goes on from the prompt"}
    return {turn: origins.get(origin, f"goes on from turn {origin}") for turn, origin in forks if turn is not None}


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with its calls as ``name(argument=value)``."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    content: Any = message.get("content")
    if isinstance(content, list):  # the names of images stand in their place
        parts = (part["text"] if "text" in part else f"[image {part.get('image', '')}]" for part in content)
        content = "".join(parts)
    written = list[str]()
    for function in (call["function"] for call in calls):
        arguments = (f"{name}={value!r}" for name, value in function["arguments"].items())
        written.append(f"{function['name']}({', '.join(arguments)})")
    return " ".join(part for part in (str(content or ""), *written) if part)


@dataclass(frozen=True)
class PolicyTurn:
    """A turn of the policy."""

    row: int
    """Row of the completions."""
    turn: int
    """0, 1, 2, ... in the row."""
    token_ids: list[int]
    """Tokens that the policy sampled in this turn, including the one that ended it."""
    ended: bool
    """True if it ended by EOS or a stop string; False where the turn was cut at its longest."""


@dataclass(frozen=True)
class EnvironmentTurn:
    """The answer to a turn."""

    row: int
    token_ids: Sequence[int] | None
    """The policy's input before its next turn, possibly empty. None: the conversation is over."""
    max_new_tokens: int = 0
    """Largest length of the next turn, 1 or more; it is cut at ``sampling.max_new_tokens`` too."""
    ended: bool = True
    """True if a conversation that is over reached its end; False where a limit cut it."""
    seen: Sequence[Later] = ()
    """Images in ``token_ids``, at their columns in these."""


class Responder(ABC):
    """The other side of every row of one request."""

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """The largest length of a row, including the environment's tokens: ``sampling.max_new_tokens`` or more."""

    @abstractmethod
    def tell(self, turn: PolicyTurn) -> None:
        """Begin to answer. Does not wait for it."""

    @abstractmethod
    def answers(self, *, wait: bool) -> list[EnvironmentTurn]:
        """Return the answers that are ready and not yet returned, one for each turn that was passed to `tell`.

        Args:
            wait: Wait until there is one or more. Only if some turn has not been answered.
        """
