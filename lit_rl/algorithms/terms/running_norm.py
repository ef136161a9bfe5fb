"""Running normalisation of rewards."""

from __future__ import annotations

import math

from torch import Tensor

from lit_rl.errors import in_range


class RunningNorm:
    """Running normalisation: rewards less their mean, divided by their standard deviation, since the start of the run.

    Welford's algorithm over every scored reward of every rank. The current rollout is included; rewards that are all
    equal become 0.

    Args:
        eps: Added to the deviation.
    """

    def __init__(self, eps: float = 1e-8) -> None:
        in_range("algo.reward_norm.eps", eps, low=0)
        self.eps = eps
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def __call__(self, rewards: Tensor) -> Tensor:
        """Update with the rewards `(n,)` of all ranks, NaN for unscored ones, and return them normalised."""
        scored = rewards[~rewards.isnan()].double()
        if len(scored):
            count = self._count + len(scored)
            mean, squares = float(scored.mean()), float((scored - scored.mean()).square().sum())
            delta = mean - self._mean
            self._squares += squares + delta * delta * self._count * len(scored) / count
            self._mean += delta * len(scored) / count
            self._count = count
        return self.scaled(rewards)

    def scaled(self, rewards: Tensor) -> Tensor:
        """Return rewards normalised by the current statistics, without an update."""
        std = math.sqrt(self._squares / max(1, self._count - 1))
        return (rewards - self._mean) / (std + self.eps) if std else rewards - self._mean

    def state(self) -> dict[str, float]:
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state(self, saved: dict[str, float]) -> None:
        self._count, self._mean, self._squares = int(saved["count"]), saved["mean"], saved["squares"]
