"""Rewards that differ within a group, whatever the shipped policy writes."""

from __future__ import annotations

import os
import signal
from typing import Any


def odd(completions: list[str]) -> list[float]:
    return [float(sum(map(ord, text)) % 2) for text in completions]


def not_in_the_second_rollout(completions: list[str], trainer_state: Any) -> list[float | None]:
    """None is no reward: of a rollout without any nothing is learned."""
    return [None if trainer_state.step == 1 else value for value in odd(completions)]


def ending_one_rank(completions: list[str], trainer_state: Any) -> list[float]:
    """In the second rollout the last rank is sent SIGTERM, by the process in which its rewards are computed."""
    if trainer_state.step == 2 and os.environ.get("LOCAL_RANK") == "1":
        os.kill(os.getppid(), signal.SIGTERM)
    return odd(completions)


class Asks:
    """A second turn for some, so that a rank may need one more than the other."""

    def reset(self, *, seed: int) -> None:
        self.turns = 0

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        return "?", 0.0, self.turns == 2 or bool(odd([action])[0]), False, {}
