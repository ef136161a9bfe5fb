"""The mean of the steps' mean rewards: what BCO compares a reward with, arXiv:2404.04656."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class RewardShift:
    """The mean so far, which changes between steps only."""

    def __init__(self) -> None:
        self.steps = 0
        self.value = 0.0

    def with_step(self, mean: Tensor) -> Tensor:
        """0-dim: the mean with one further step of this mean reward taken in. Changes nothing."""
        return (self.steps * self.value + mean) / (self.steps + 1)

    def add(self, mean: float) -> None:
        """A step of this mean reward was taken."""
        self.value += (mean - self.value) / (self.steps + 1)
        self.steps += 1

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"steps": self.steps, "shift": self.value}

    def load_state(self, saved: dict[str, Any]) -> None:
        """The counterpart of `state`."""
        self.steps, self.value = saved["steps"], saved["shift"]
