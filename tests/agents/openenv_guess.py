"""A game served as OpenEnv serves any: the server of the tests, `python openenv_guess.py PORT`."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    text: str


class Hint(Observation):
    text: str


class GuessServer(Environment):
    """A number from 0 to 9, and whether it is larger than a guess."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self._number, self._steps = random.Random(seed).randint(0, 9), 0
        return Hint(text="0..9=")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self._steps += 1
        guess = action.text.strip()
        if guess == str(self._number):
            return Hint(text="=", done=True, reward=1.0)
        smaller = guess.isdigit() and int(guess) > self._number
        return Hint(text="<=" if smaller else ">=", done=False, reward=0.0)

    @property
    def state(self) -> State:
        return State(step_count=self._steps)


if __name__ == "__main__":
    app = create_app(GuessServer, Guess, Hint, max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
