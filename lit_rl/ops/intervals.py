"""Confidence intervals of shares, in plain numbers."""

from __future__ import annotations

import math

Z = 1.959963984540054
"""Standard deviations around the mean within which 95 % of a normal distribution lie."""


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return the ends of Wilson's score interval of 95 % (Wilson 1927), which stays right near 0 and 1.

    Args:
        share: Of the values that are 1, in [0, 1].
        n: How many values there are, at least 1.
    """
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
