"""The interface of an environment: one row's episode, turn by turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_rl.episodes import End
from lit_rl.rollout import Message

Opening = str | Sequence[Message] | None
"""The first observation of an environment: a text that goes on the end of the prompt's last message, messages after it,
or nothing. Parts of texts and images (`lit_rl.environments.observations.Content`), which have no role, go on the end of
the last message too."""


@dataclass(frozen=True)
class Turn:
    """A turn of the policy."""

    text: str
    """Without special tokens, and without what is thought apart."""
    written: str
    """With the special tokens, but for the one that ended it: calls of tools may be written with them."""
    cut: bool
    """True if it was cut at its maximal length, and did not end by itself."""
    thought: str = ""
    """Its thoughts, where a model writes them apart (gpt-oss); of other models thoughts are part of the text."""

    def message(self, content: str) -> Message:
        """Return the turn as a message of this content, with its thoughts under the key that templates read."""
        said: Message = {"role": "assistant", "content": content}
        return said | {"thinking": self.thought} if self.thought else said


@dataclass(frozen=True)
class Reply:
    """The reply to a turn."""

    said: Message
    """The policy's turn as a message, with the calls that were read in it."""
    messages: Sequence[Message] = ()
    """The replies, all of tools or all of the user. Those to the last turn are never read by the policy, and kept."""
    end: End | None = None
    """Why the episode is over with it; None: it goes on."""
    reward: float | None = None
    """The reward of the turn."""
    calls: int = 0
    failed_calls: int = 0
    unreadable_calls: int = 0


class Environment(ABC):
    """One row's. Made anew for each episode, used by it alone, and closed after it."""

    @abstractmethod
    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        """Begin the episode.

        Args:
            seed: In [0, 2^31). The episodes of one prompt have the same, so that they differ by what the policy does.
            row: The prompt and the other columns of the data's row.
        """

    @abstractmethod
    async def answer(self, turn: Turn) -> Reply:
        """Answer a turn of the policy."""

    async def reward(self) -> float | None:
        """Return the reward of the whole episode when it is over; None where it has none beside those of its turns."""
        return None

    async def close(self) -> None:  # noqa: B027 (optional)
        """Release its resources."""

    def timed_out(self, error: str) -> None:  # noqa: B027 (optional)
        """Record that the episode ran into a time limit, which the error names. Only `close` is called after it."""
