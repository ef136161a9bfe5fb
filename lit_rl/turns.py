"""What a generator and the other side of a conversation tell each other: tokens, a turn at a time.

One call of ``Generator.generate`` holds whole conversations. Whenever a row has finished a turn, the generator tells
the responder (`Said`) and goes on with other rows; the responder answers when it can (`Heard`), in any order. What the
policy said is never decoded and encoded again, and a generator knows of nothing but tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_rl.vision import Later


@dataclass(frozen=True)
class Said:
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
class Heard:
    """The answer to a turn."""

    row: int
    token_ids: Sequence[int] | None
    """The policy's input before its next turn, possibly empty. None: the conversation is over."""
    room: int = 0
    """Tokens that the next turn may have at most, 1 or more; it is cut at ``sampling.max_new_tokens`` too."""
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
    def tell(self, said: Said) -> None:
        """Begin to answer. Does not wait for it."""

    @abstractmethod
    def answers(self, *, wait: bool) -> list[Heard]:
        """Return the answers that are ready and not yet returned, one for each turn that was passed to `tell`.

        Args:
            wait: Until there is one or more. Only where some turn has not been answered.
        """
