"""Ranges of settings, declared by the annotation of a parameter or a field: ``clip_low: Share = 0.2``.

Constructors check them (`lit_rl.core.declared_settings`). Functions check nothing of it themselves, since they run at
every step: the code that reads a user's settings checks them against the annotations once. None, where a parameter
allows it, is in every range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    """The range of one number: ``[low, high]``, or ``(low, high]`` with `open_low`. NaN is in no range."""

    low: int | float
    high: int | float = inf
    open_low: bool = False
    open_high: bool = False
    whole: bool = False
    """True if only whole numbers are allowed."""

    @property
    def bounds(self) -> dict[str, Any]:
        """The ends, as keywords of `lit_rl.core.errors.in_range`."""
        return {name: value for name, value in vars(self).items() if name != "whole"}


@dataclass(frozen=True)
class OneOf:
    """The words to choose from, where they are not known to a type checker as a `Literal`."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Above:
    """The range of one number above a bound, which follows from other settings of the same function."""

    bound: Callable[..., float]
    """The function from the settings that it names to the bound."""


@dataclass(frozen=True)
class Pair:
    """The range of two numbers."""

    meaning: str
    """A description of the two numbers, for the message."""
    sound: Callable[[float, float], bool]
    """The test of two numbers."""


Share = Annotated[float, Range(0.0, 1.0, open_low=True)]
"""A number in (0, 1]."""

Fraction = Annotated[float, Range(0.0, 1.0, open_low=True, open_high=True)]
"""A number in (0, 1)."""

Portion = Annotated[float, Range(0.0, 1.0)]
"""A number in [0, 1]."""

AtLeastZero = Annotated[int, Range(0.0, whole=True)]
"""A whole number of at least 0."""

AtLeastOne = Annotated[int, Range(1.0, whole=True)]
"""A whole number of at least 1."""

AtLeastTwo = Annotated[int, Range(2.0, whole=True)]
"""A whole number of at least 2."""

Positive = Annotated[float, Range(0.0, open_low=True)]
"""A number above 0."""

NotNegative = Annotated[float, Range(0.0)]
"""A number of at least 0."""

NotNegativeFinite = Annotated[float, Range(0.0, open_high=True)]
"""A number of at least 0, and not infinite."""

PositiveFinite = Annotated[float, Range(0.0, open_low=True, open_high=True)]
"""A number above 0, and not infinite."""

Real = Annotated[float, Range(-inf, open_low=True, open_high=True)]
"""A number of either sign, and not infinite."""

AboveOne = Annotated[float, Range(1.0, open_low=True)]
"""A number above 1."""

ClipRange = Annotated[
    Sequence[float],
    Pair("[lower, upper] distance from 1, the lower in (0, 1]", lambda low, high: 0 < low <= 1 and high > 0),
]
"""Distances of the two bounds on a ratio from 1."""

Band = Annotated[Sequence[float], Pair("[lowest, highest] covariance", lambda low, high: low < high)]
"""Two numbers, the lower one first."""

WeightRange = Annotated[
    Sequence[float], Pair("[lowest, highest] weight, 1 between them, above 0", lambda low, high: 0 < low <= 1 <= high)
]
"""Two bounds on a weight that is 1 where nothing has changed."""

GammaShape = Annotated[
    Sequence[float],
    Pair("[k, lambda] with k at least 0 and lambda above 0", lambda k, rate: k >= 0 and rate > 0),
]
"""Exponent and rate of a Gamma-shaped weight."""
