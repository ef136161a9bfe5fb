"""A game whose server is lost in the middle of a run, where the environment says so."""

from __future__ import annotations

import os
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
