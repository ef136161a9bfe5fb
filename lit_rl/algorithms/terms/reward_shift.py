"""BCO's reward shift (2404.04656): the mean of the steps' mean rewards."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class RewardShift:
    """The mean of the mean rewards of all steps so far, which changes only between steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.value = 0.0

    def with_step(self, mean: Tensor) -> Tensor:
        """Return the mean with one further step of this mean reward, 0-dim. Changes no state."""
        return (self.steps * self.value + mean) / (self.steps + 1)

    def add(self, mean: float) -> None:
        """Add a step with this mean reward."""
        self.value += (mean - self.value) / (self.steps + 1)
        self.steps += 1

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"steps": self.steps, "shift": self.value}

    def load_state(self, saved: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.steps, self.value = saved["steps"], saved["shift"]
