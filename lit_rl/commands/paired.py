"""Whether two runs differ on the same prompts: the mean difference, its 95 % interval, and a paired test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lit_rl.ops.intervals import wilson


@dataclass(frozen=True)
class Paired:
    """The result of a paired test on two runs."""

    prompts: int
    first: float
    """Mean of the first run."""
    second: float
    difference: float
    """The second less the first."""
    low: float
    high: float
    """Ends of its 95 % interval; infinite for a single prompt."""
    p: float
    """Probability of a difference as large, or larger, where the runs do not differ; two-sided."""
    test: str
    """`McNemar` or `t`."""

    @property
    def interval(self) -> str:
        """The interval as text."""
        return f"[{self.low:+.3f}, {self.high:+.3f}]" if math.isfinite(self.high) else "one prompt"

    @property
    def p_text(self) -> str:
        """`p` as text."""
        return "<0.0001" if self.p < 1e-4 else f"{self.p:.4f}"


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """Test finite values of the same prompts, one a prompt, in the same order; at least one.

    Where every value is 0 or 1: McNemar's exact test (1947), and the interval that Newcombe (1998) makes of the two
    Wilson intervals and their correlation, which stays right near 0 and 1. Else the t test of the differences, and its
    interval.
    """
    n = len(first)
    differences = [b - a for a, b in zip(first, second, strict=True)]
    means = sum(first) / n, sum(second) / n
    difference = sum(differences) / n
    if {*first, *second} <= {0.0, 1.0}:
        low, high = newcombe(first, second)
        better, worse = differences.count(1.0), differences.count(-1.0)
        return Paired(n, *means, difference, low, high, mcnemar(better, worse), "McNemar")
    if n == 1:
        return Paired(n, *means, difference, -math.inf, math.inf, 1.0, "t")
    spread = math.sqrt(sum((each - difference) ** 2 for each in differences) / (n - 1) / n)
    half = spread * t_quantile(0.95, n - 1)
    p = 1 - t_within(abs(difference) / spread, n - 1) if spread else float(difference == 0)
    return Paired(n, *means, difference, difference - half, difference + half, max(0.0, p), "t")


def mcnemar(better: int, worse: int) -> float:
    """Return the two-sided probability that a fair coin splits the prompts that changed as unevenly as this, or
    more."""
    changed, fewer = better + worse, min(better, worse)
    tail = sum(math.comb(changed, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**changed)


def newcombe(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the interval of a difference of paired shares (Newcombe 1998, method 10)."""
    n = len(first)
    p, q = sum(first) / n, sum(second) / n
    (low_p, high_p), (low_q, high_q) = wilson(p, n), wilson(q, n)
    both = sum(a * b for a, b in zip(first, second))
    neither = sum((1 - a) * (1 - b) for a, b in zip(first, second))
    a, b, c, d = both, n * p - both, n * q - both, neither
    sizes = (a + b) * (c + d) * (a + c) * (b + d)
    product = a * d - b * c
    if product > 0:
        product = max(product - n / 2, 0.0)
    phi = product / math.sqrt(sizes) if sizes > 0 else 0.0

    def reach(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one * one - 2 * phi * one * other + other * other))

    return q - p - reach(q - low_q, high_p - p), q - p + reach(high_q - q, p - low_p)


def t_within(t: float, freedom: int) -> float:
    """Return the probability that Student's t with these degrees of freedom lies within -t and t (Abramowitz and
    Stegun 26.7.3 and 4).

    `t`: at least 0. `freedom`: at least 1.
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, 0.0) if freedom % 2 else (1.0, 0.0)
    for k in range(3 if freedom % 2 else 2, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total


def t_quantile(within: float, freedom: int) -> float:
    """Return the t that this share lies within, `within` in (0, 1)."""
    low, high = 0.0, 1.0
    while t_within(high, freedom) < within:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, freedom) < within else (low, middle)
    return high
