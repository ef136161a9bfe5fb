"""Tools and games that go wrong while an episode goes on, and an engine that is lost, for test_episode_faults.py."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_rl.core.episode import EnvironmentTurn, PolicyTurn, Responder
from lit_rl.core.errors import GenerationError
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.generation.native import NativeGenerator


def double(a: int) -> int:
    """Double a number.

    Args:
        a: The number.
    """
    return 2 * a


def hangs() -> str:
    """Block."""
    time.sleep(30)
    return "late"


def counts() -> str:
    """Be asked: a line of the file that `ASKED` names."""
    with Path(os.environ["ASKED"]).open("a") as file:
        file.write("asked\n")
    return "told"


def paid(completions: Sequence[Any]) -> list[float]:
    """The same for everybody."""
    return [1.0 for _ in completions]


class Game:
    def reset(self, *, seed: int) -> None:
        pass

    def step(self, action: str) -> tuple[Any, ...]:
        return "more", self._paid(), False, False, {}

    def _paid(self) -> float:
        return 0.5


class Raises(Game):
    def _paid(self) -> float:
        raise ConnectionError("the server of the game is gone")


class NotANumber(Game):
    def _paid(self) -> float:
        return float("nan")


class Lost(Responder):
    """The conversations of an engine that dies once it has heard so many answers."""

    def __init__(self, responder: Responder, left: int) -> None:
        self._responder, self._left = responder, left

    @property
    def max_tokens(self) -> int:
        return self._responder.max_tokens

    def tell(self, said: PolicyTurn) -> None:
        if not self._left:
            raise GenerationError("the engine died: its last words")
        self._left -= 1
        self._responder.tell(said)

    def answers(self, *, wait: bool) -> list[EnvironmentTurn]:
        return self._responder.answers(wait=wait)


class DiesInTheMiddle(NativeGenerator):
    """Dies in the second rollout once two rows have said something, where the environment has `ENGINE_DIES`."""

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        if self._version == 1 and os.environ.get("ENGINE_DIES") and prompts.responder is not None:
            prompts = replace(prompts, responder=Lost(prompts.responder, 2))
        return super().generate(prompts, sampling)
