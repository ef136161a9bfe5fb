"""A small game in text, so that an agent can be trained without anything of one's own: guess a number by its hints."""

from __future__ import annotations

import random
import re
from typing import Any

from lit_rl.environments.demonstrations import GameDemonstrations

PROMPT = "0..9="


class GuessNumber:
    """The number is drawn from 0 to `highest`, by the seed. A wrong guess is answered ``>=`` where the number is larger
    and ``<=`` where it is smaller; what is no number ``?=``. The right guess ends the game and is worth 1.

    Halving the range finds one of ten numbers within four turns; guesses that read no hint find it in 4 of 10 games.
    """

    def reset(self, *, seed: int, highest: int = 9) -> None:
        self.number = random.Random(seed).randint(0, highest)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, int]]:
        """Return gymnasium's five values: observation, reward, terminated, truncated, info."""
        guess = int(action) if re.fullmatch(r"\d{1,3}", action) else None
        right = guess == self.number
        hint = "?=" if guess is None else ">=" if guess < self.number else "<="
        return "" if right else hint, float(right), right, False, {}


class GuessDemonstrations(GameDemonstrations):
    """Games of a player who reads the hints and guesses at random among the numbers they leave:

    `{"prompt": "0..9=7<|im_end|><=", "completion": "3"}`, a row for each turn. A policy that imitates them knows the
    form of the game, and wins it as often as chance does; how to halve the range is left to learn.

    Args:
        games: Number of games, 1 or more.
        turns: Longest game, in turns, 1 or more.
        end: The text of the token that ends a turn of the policy.
        seed: Seed of the games.
    """

    def __init__(self, games: int = 4000, turns: int = 4, end: str = "<|im_end|>", seed: int = 0) -> None:
        super().__init__(games, turns, end, seed)

    def _game(self, draw: random.Random) -> list[dict[str, Any]]:
        game, rows, text, low, high = GuessNumber(), [], PROMPT, 0, 9
        game.reset(seed=draw.getrandbits(31))
        for _ in range(self.turns):
            guess = draw.randint(low, high)
            rows.append({"prompt": text, "completion": str(guess)})
            hint, _, right, _, _ = game.step(str(guess))
            if right:
                break
            low, high = (guess + 1, high) if hint == ">=" else (low, guess - 1)
            text += f"{guess}{self.end}{hint}"
        return rows
