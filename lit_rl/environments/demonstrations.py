"""Games that somebody plays for a policy to imitate: texts, a row for each turn."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Any

from lit_rl.errors import in_range


class GameDemonstrations(ABC):
    """Abstract: subclasses say how one game is played.

    Args:
        games: Number of games, 1 or more.
        turns: Longest game, in turns, 1 or more.
        end: The text of the token that ends a turn of the policy.
        seed: Seed of the games.
    """

    def __init__(self, games: int, turns: int, end: str, seed: int) -> None:
        in_range("data.task.games", games, low=1)
        in_range("data.task.turns", turns, low=1)
        self.games, self.turns, self.end, self.seed = games, turns, end, seed

    def train(self) -> list[dict[str, Any]]:
        """Return a row for each turn of each game."""
        draw = random.Random(self.seed)
        return [row for _ in range(self.games) for row in self._game(draw)]

    def val(self) -> list[dict[str, Any]]:
        """Return no rows: `env=` plays the game itself."""
        return []

    @abstractmethod
    def _game(self, draw: random.Random) -> list[dict[str, Any]]:
        """Return the rows of one game: ``prompt``, the text before the turn, and ``completion``."""
