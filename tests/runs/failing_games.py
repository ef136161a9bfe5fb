"""A game whose server is lost in the middle of a run, where the environment says so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lit_rl.environments.games import GuessNumber


class Unreachable(GuessNumber):
    """Every episode after the first `GAMES_UNTIL_LOST` of the process fails in its first turn; without it, none."""

    begun = 0

    def reset(self, *, seed: int) -> Any:
        type(self).begun += 1
        self.lost = type(self).begun > int(os.environ.get("GAMES_UNTIL_LOST", "1000000"))
        return super().reset(seed=seed)

    def step(self, action: str) -> Any:
        if self.lost:
            raise ConnectionError("the game server is gone")
        return super().step(action)


def unreachable(prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
    """The same of a function that makes whole rollouts, of one turn."""
    out = trainer.generate([trainer.encode(prompt) for prompt in prompts])
    first = Unreachable.begun
    Unreachable.begun += len(prompts)
    limit = int(os.environ.get("GAMES_UNTIL_LOST", "1000000"))
    lost = [first + number >= limit for number in range(len(prompts))]
    return out | {"episode_error": [ConnectionError("the game server is gone") if each else None for each in lost]}


def rated(completions: Sequence[str]) -> list[float]:
    """By the characters."""
    return [float(sum(map(ord, text)) % 3) for text in completions]
