"""Games with one fault each, for `lit-rl env-check`."""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

Five = tuple[Any, Any, bool, bool, dict]


class Sound:
    """Nothing is wrong with it: says how many turns there were, and pays for the word `win`."""

    def reset(self, *, seed: int) -> str:
        self.turns, self.draw = 0, random.Random(seed)
        return f"seed {self.draw.random():.3f}: "

    def step(self, action: str) -> Five:
        self.turns += 1
        return self._said(), self._paid(action), False, False, {}

    def _said(self) -> str:
        return f"turn {self.turns}"

    def _paid(self, action: str) -> float:
        return float(action == "win")


class Dice(Sound):
    """Throws the dice that everybody has."""

    def _said(self) -> str:
        return f"a {random.randint(1, 6)}"


class Numpy(Sound):
    def _said(self) -> str:
        return f"a {np.random.randint(6)}"


class Torch(Sound):
    def _said(self) -> str:
        return f"a {torch.rand(()).item():.3f}"


class Shared(Sound):
    """Keeps its list at the class, where every object appends to it."""

    moves: list[str] = []

    def _said(self) -> str:
        self.moves.append("x")
        return f"{len(self.moves)} moves"


class SharedWhileItLasts(Sound):
    """Keeps its list at the class, and empties it in reset: seen only where two go on at the same time."""

    moves: list[str] = []

    def reset(self, *, seed: int) -> str:
        type(self).moves = []
        return super().reset(seed=seed)

    def _said(self) -> str:
        self.moves.append("x")
        return f"{len(self.moves)} moves"


class Clock(Sound):
    def _said(self) -> str:
        return f"it is {time.time_ns()}"


class Hashed(Sound):
    def _said(self) -> str:
        return f"{hash('north') % 1000}"


class NotANumber(Sound):
    def _paid(self, action: str) -> float:
        return math.nan


class Raises(Sound):
    def _paid(self, action: str) -> float:
        return float(int(action) == 3)


KEPT: list[Any] = []


class Threads(Sound):
    def reset(self, *, seed: int) -> str:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().reset(seed=seed)


class Files(Sound):
    def reset(self, *, seed: int) -> str:
        KEPT.append(open(os.devnull))  # noqa: SIM115 (the fault)
        return super().reset(seed=seed)


class Memory(Sound):
    def reset(self, *, seed: int) -> str:
        KEPT.append([object() for _ in range(1000)])
        return super().reset(seed=seed)


class Talkative(Sound):
    def _said(self) -> str:
        return "word " * 500


class Slow(Sound):
    def _said(self) -> str:
        time.sleep(0.3)
        return super()._said()


class Hangs(Sound):
    def _said(self) -> str:
        time.sleep(1.5)
        return super()._said()


def shared_instance() -> Sound:
    return THE_ONE


THE_ONE = Sound()


def kept() -> Iterator[None]:
    """What the leaking games keep, let go afterwards."""
    yield
    for each in KEPT:
        if hasattr(each, "close"):
            each.close()
    KEPT.clear()
