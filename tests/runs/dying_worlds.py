"""A game and tools in whose middle the run is killed, once: at the call whose number the file `WORLD/dies_at` holds.

Every call in every process of a run adds a byte to `WORLD/calls`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "algorithms"))

from forking_agents import compacting, letters

__all__ = ["forks", "letters"]


def call() -> int:
    """How many calls there were; does not return where the process dies before this one."""
    folder = Path(os.environ["WORLD"])
    calls, dies_at = folder / "calls", folder / "dies_at"
    count = calls.stat().st_size if calls.exists() else 0
    if dies_at.exists() and count == int(dies_at.read_text()):
        dies_at.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    with calls.open("ab") as file:
        file.write(b".")
    return count


class Sums:
    """Deterministic: answers with the sum of the digits that were said; three turns."""

    def reset(self, *, seed: int) -> None:
        self.sum = seed % 7

    def step(self, action: str) -> tuple[Any, ...]:
        call()
        self.sum += sum(int(c) for c in action if c.isdigit())
        return f"{self.sum % 10}", float(self.sum % 3), False, False, {}


def _tool(digit: str) -> Callable[[], str]:
    def world() -> str:
        """Say how many calls there were: never the same twice."""
        return f"{call() % 10}"

    world.__name__ = digit
    return world


for digit in "0123456789":  # what the shipped policy writes is a call of one of these
    globals()[f"tool_{digit}"] = _tool(digit)


def told(episodes: list[dict[str, Any]]) -> list[float]:
    """A reward that the world decides: the sum of what it said."""
    said = [[m["content"] for m in each["messages"] if m["role"] == "tool"] for each in episodes]
    return [float(sum(int(text) for text in texts if text.isdigit()) % 7) for texts in said]


def forks(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
    """An agent that shortens its history."""
    call()
    return compacting(prompts, trainer)
