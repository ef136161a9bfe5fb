"""The other side of one episode: what a row's conversation asks of it, turn by turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_rl.episodes import End
from lit_rl.rollout import Message

Opening = str | Sequence[Message] | None
"""What an environment begins with: a text that goes on the end of the prompt's last message, messages behind it, or
nothing. Parts of texts and images (`lit_rl.environments.observations.Content`), which have no role, go on the end of
the last message too."""


@dataclass(frozen=True)
class Turn:
    """What the policy said."""

    text: str
    """Without special tokens, and without what is thought apart."""
    written: str
    """With the special tokens, but for the one that ended it: calls of tools may be written with them."""
    cut: bool
    """Whether it was cut at its longest, and did not come to its end."""
    thought: str = ""
    """What it thought, where a model says that apart (gpt-oss); of other models thoughts are part of the text."""

    def message(self, content: str) -> Message:
        """The turn as a message of this content, with its thoughts where templates look for them."""
        said: Message = {"role": "assistant", "content": content}
        return said | {"thinking": self.thought} if self.thought else said


@dataclass(frozen=True)
class Reply:
    """What a turn is answered."""

    said: Message
    """The policy's turn as a message, with the calls that were read in it."""
    messages: Sequence[Message] = ()
    """The answer: all by tools, or all by the user. What answers the last turn is never read, and kept."""
    end: End | None = None
    """Why the episode is over with it; None: it goes on."""
    reward: float | None = None
    """Of the turn."""
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
        """Of the whole episode, when it is over. None: it has none, beside those of its turns."""
        return None

    async def close(self) -> None:  # noqa: B027 (optional)
        """Let go what it holds."""

    def timed_out(self, error: str) -> None:  # noqa: B027 (optional)
        """It has ended at a limit of time, which the error tells: it is asked for nothing more, and closed."""
