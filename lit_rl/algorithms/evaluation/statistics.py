"""Numbers for people: rollout metrics, averages, confidence intervals, pass@k. Nothing here feeds a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.ranks import Ranks
from lit_rl.ops.advantages import group_std
from lit_rl.ops.mismatch import effective_share
from lit_rl.ops.step import Effective, Highest, Lowest, Metric


class Averages:
    """Sums of numerators over sums of denominators, and extremes, kept on the device and reduced over ranks at once."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.highest: dict[str, Tensor] = {}
        """Extremes; a lowest value is kept as its negative, under a name that begins with a minus sign."""
        self.moments: dict[str, Tensor] = {}
        """Of weights whose effective share is reported."""

    def add(self, metrics: Mapping[str, Metric]) -> None:
        for name, metric in metrics.items():
            if isinstance(metric, Highest):
                self._raise_to(name, metric.value.detach().double())
            elif isinstance(metric, Lowest):
                self._raise_to(f"-{name}", -metric.value.detach().double())
            elif isinstance(metric, Effective):
                self._add_to(self.moments, name, metric.moments.detach())
            else:
                self._add_to(self.sums, name, torch.stack([part.detach().double() for part in metric]))

    @staticmethod
    def _add_to(sums: dict[str, Tensor], name: str, part: Tensor) -> None:
        sums[name] = sums[name] + part if name in sums else part

    def _raise_to(self, name: str, value: Tensor) -> None:
        self.highest[name] = torch.maximum(self.highest[name], value) if name in self.highest else value

    def reduce(self, ranks: Ranks) -> dict[str, float]:
        """The averages and extremes over everything added on every rank since the last call; NaN where of nothing."""
        sums = _joint(self.sums, ranks, torch.zeros(2), Ranks.total)
        highest = _joint(self.highest, ranks, torch.tensor(-math.inf), _highest)
        moments = _joint(self.moments, ranks, torch.zeros(3), Ranks.total)
        self.sums, self.highest, self.moments = {}, {}, {}
        means = {name: (num / den if den else math.nan) for name, (num, den) in sums.items()}
        finite = {name: value if math.isfinite(value) else math.nan for name, value in highest.items()}
        extremes = {name.lstrip("-"): -value if name[0] == "-" else value for name, value in finite.items()}
        shares = {name: float(effective_share(torch.tensor(of, dtype=torch.float64))) for name, of in moments.items()}
        return means | extremes | shares

    def state(self) -> dict[str, dict[str, Tensor]]:
        """For a checkpoint."""
        parts = {"means": self.sums, "extremes": self.highest, "sums": self.moments}
        return {part: {name: value.cpu().clone() for name, value in values.items()} for part, values in parts.items()}

    def load_state(self, saved: Mapping[str, Mapping[str, Tensor]], device: torch.device) -> None:
        """The counterpart of `state`."""
        parts = ({name: value.to(device) for name, value in saved[p].items()} for p in ("means", "extremes", "sums"))
        self.sums, self.highest, self.moments = parts


def _joint(
    values: Mapping[str, Tensor], ranks: Ranks, nothing: Tensor, join: Callable[[Ranks, Tensor], Tensor]
) -> dict[str, Any]:
    """The values that any rank has, by name, joined over the ranks; `nothing` stands for one that a rank lacks."""
    names = ranks.names(values)
    if not names:
        return {}
    table = torch.stack([values.get(name, nothing).to(ranks.device, torch.float64) for name in names])
    return dict(zip(names, join(ranks, table).tolist()))


def _highest(ranks: Ranks, mine: Tensor) -> Tensor:
    return ranks.gather(mine[None]).amax(0)


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
    if len(x) == 0:
        return math.nan
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
