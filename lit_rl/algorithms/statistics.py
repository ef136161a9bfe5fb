"""Numbers for people: rollout metrics, averages, confidence intervals, pass@k. Nothing here feeds a gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lit_rl.ops.advantages import group_std

Metric = tuple[Tensor, Tensor]
"""Numerator and denominator."""


class Averages:
    """Sums of numerators over sums of denominators, kept on the device and reduced over ranks in one collective."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        for name, (numerator, denominator) in metrics.items():
            pair = torch.stack([numerator.detach().double(), denominator.detach().double()])
            self.sums[name] = self.sums[name] + pair if name in self.sums else pair

    def reduce(self, device: torch.device) -> dict[str, float]:
        """The averages over everything added on every rank since the last call."""
        if not self.sums:
            return {}
        names = sorted(self.sums)
        table = torch.stack([self.sums[name].to(device) for name in names])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(table)
        self.sums = {}
        return {name: (num / den if den else math.nan) for name, (num, den) in zip(names, table.tolist())}


def rollout_metrics(
    names: Sequence[str], values: Tensor, rewards: Tensor, group_id: Tensor, lengths: Tensor, ended: Tensor
) -> dict[str, float]:
    """TRL's rollout metrics over the rows of all ranks.

    Args:
        names: Reward functions, k of them.
        values: `(n, k)` what each function gave; NaN where it does not apply.
        rewards: `(n,)` weighted sums; NaN where no function applies.
        group_id: `(n,)`.
        lengths: `(n,)` sampled tokens.
        ended: `(n,)` bool: by EOS or stop string, not cut.
    """
    scored = ~rewards.isnan()
    std = group_std(rewards.float(), group_id)
    metrics = {
        "reward": _mean(rewards[scored]),
        "reward_std": _std(rewards[scored]),
        "frac_reward_zero_std": _mean((std[scored] == 0).double()),
        "completions/mean_length": _mean(lengths),
        "completions/min_length": _extreme(lengths, torch.min),
        "completions/max_length": _extreme(lengths, torch.max),
        "completions/clipped_ratio": _mean((~ended).double()),
        "completions/mean_terminated_length": _mean(lengths[ended]),
        "completions/min_terminated_length": _extreme(lengths[ended], torch.min),
        "completions/max_terminated_length": _extreme(lengths[ended], torch.max),
        "completions/unscored": float((~scored).sum()),
    }
    for i, name in enumerate(names):
        column = values[:, i][~values[:, i].isnan()]
        metrics[f"rewards/{name}/mean"] = _mean(column)
        metrics[f"rewards/{name}/std"] = _std(column)
    return metrics


def _mean(x: Tensor) -> float:
    return float(x.double().mean()) if len(x) else math.nan


def _std(x: Tensor) -> float:
    return float(x.double().std()) if len(x) > 1 else 0.0


def _extreme(x: Tensor, which) -> float:
    return float(which(x)) if len(x) else math.nan


def mean_with_interval(x: Tensor) -> tuple[float, float, float]:
    """Mean and its 95 % interval `(mean, low, high)`.

    Wilson's score interval where every value is 0 or 1 (it stays right near 0 and 1); otherwise the normal interval of
    the mean. `x`: `(n,)`, one independent value each (average the samples of one prompt first).
    """
    x = x.double()
    n = len(x)
    if n == 0:
        return math.nan, math.nan, math.nan
    mean, z = float(x.mean()), 1.959963984540054
    if bool(((x == 0) | (x == 1)).all()):
        centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        return mean, max(0.0, centre - half), min(1.0, centre + half)
    half = z * float(x.std()) / math.sqrt(n) if n > 1 else math.inf
    return mean, mean - half, mean + half


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Chance that at least one of k samples, drawn from `samples` of which `right` are right, is right (2107.03374)."""
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} is outside 1..{samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)
