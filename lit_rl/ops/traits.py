"""Traits of functions of tensors: what they read and compare, declared beside them by a decorator.

    @AdvantageTraits(compares_group=True)
    def centered(rewards, group_id): ...

The decorator returns the function itself, with an attribute that `traits_of` reads, also through a `functools.partial`.
Nothing is computed at a call. The traits of a function decide which settings it is refused with, and what can be left
out; a function without traits gets the columns that its signature names, and nothing else is known of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
AnyTraits = TypeVar("AnyTraits", bound="Traits")


class Traits:
    """The base of all traits: each is the decorator that declares it."""

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Declare these traits of a function, or of the objects of a class that can be called, and return it."""
        function.traits = self  # pyright: ignore[reportFunctionMemberAccess]
        return function


def traits_of(function: Any, kind: type[AnyTraits]) -> AnyTraits | None:
    """Return the traits of this kind that a function declares, with or without settings; None if it declares none."""
    while hasattr(function, "func"):  # a `functools.partial`, or LightningCLI's `WithKeywords`
        function = function.func
    declared = getattr(function, "traits", None)
    return declared if isinstance(declared, kind) else None


@dataclass(frozen=True)
class AdvantageTraits(Traits):
    """Traits of an estimator of advantages."""

    compares_group: bool
    """The completions of a prompt are compared with each other: a single one, rewarded at its end, has advantage 0."""
    of_tokens: bool = False
    """Advantages are of tokens, `(b, t)`, not of rows."""
    reads_rewards: bool = True
    """Advantages change with what shaping, normalisation and clipping make of the rewards."""
    reads_kl: bool = True
    """Advantages change with a KL that is subtracted at tokens without a reward."""


@dataclass(frozen=True)
class PolicyLossTraits(Traits):
    """Traits of a policy loss."""

    zero_without_advantage: bool
    """A row whose advantages are all 0 has loss 0 without gradient, and changes the loss of no other row."""
    but_for: str | None = None
    """The setting that weighs a term without advantage: `zero_without_advantage` is true only where it is 0."""


@dataclass(frozen=True)
class ReductionTraits(Traits):
    """Traits of a reduction of token losses."""

    adds_rows: bool
    """The result is a sum over rows, with denominators of a row or of the step: a row of zeros may be left out."""


@dataclass(frozen=True)
class CorrectionTraits(Traits):
    """Traits of an engine correction."""

    of_rows: bool
    """A weight is that of its whole row, given to each of the row's tokens."""


@dataclass(frozen=True)
class StatisticTraits(Traits):
    """Traits of the distance of a rejection."""

    signed: bool
    """The distance has either sign. If not, it is never negative, and 0 is the best."""


@dataclass(frozen=True)
class PreferenceTraits(Traits):
    """Traits of a loss of pairs."""

    per_token: bool
    """Log-probs, ratios or scores are divided by the lengths of completions."""
