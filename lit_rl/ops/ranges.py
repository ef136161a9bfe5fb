"""What a setting of a function may be, said by the annotation of its parameter: ``clip_low: Share = 0.2``.

The functions check nothing of it themselves, since they run at every step. Whoever is given settings by a user reads
the annotations once, and refuses what is out of range. None, where a parameter allows it, is in every range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """Of one number: ``[low, high]``, or ``(low, high]`` with `open_low`. NaN is in no range."""

    low: float
    high: float = inf
    open_low: bool = False


@dataclass(frozen=True)
class Above:
    """Of one number that has to be above a bound, which follows from other settings of the same function."""

    bound: Callable[..., float]
    """From the settings that it names to the bound."""


@dataclass(frozen=True)
class Pair:
    """Of two numbers."""

    meaning: str
    """What they are, for the message."""
    sound: Callable[[float, float], bool]
    """Whether two numbers are such a pair."""


Share = Annotated[float, Range(0.0, 1.0, open_low=True)]
"""In (0, 1]."""

Positive = Annotated[float, Range(0.0, open_low=True)]
"""Above 0."""

NotNegative = Annotated[float, Range(0.0)]
"""At least 0."""

AboveOne = Annotated[float, Range(1.0, open_low=True)]
"""Above 1."""

ClipRange = Annotated[
    Sequence[float],
    Pair("[lower, upper] distance from 1, the lower in (0, 1]", lambda low, high: 0 < low <= 1 and high > 0),
]
"""Distances of the two bounds on a ratio from 1."""

Band = Annotated[Sequence[float], Pair("[lowest, highest] covariance", lambda low, high: low < high)]
"""Two numbers, the lower one first."""

GammaShape = Annotated[
    Sequence[float],
    Pair("[k, lambda] with k at least 0 and lambda above 0", lambda k, rate: k >= 0 and rate > 0),
]
"""Exponent and rate of a Gamma-shaped weight."""
