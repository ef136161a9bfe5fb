"""Warnings about values that are allowed and yet teach nothing or too much."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from lit_rl.errors import RewardError
from lit_rl.rewards.completion import Completion, text_of

LARGE = 1e6
"""Beyond this a reward gets one warning: it swamps the other functions, and float32 loses its small differences."""

CONSTANT = 50
"""Batches in a row of one and the same value after which a function gets one warning."""


class ValueWatch:
    """A check of one function's values over batches. It is no training state.

    Args:
        name: Of the function.
        constant_limit: Batches in a row of one value that end the run; 0 is never.
    """

    def __init__(self, name: str, constant_limit: int) -> None:
        self.name, self.constant_limit = name, constant_limit
        self._large = False
        self._value, self._batches = math.nan, 0

    def observe(self, values: Sequence[float], completions: Sequence[Completion]) -> None:
        """Take in a batch; NaN is a completion that the function does not apply to.

        Raises:
            RewardError: the last `constant_limit` batches held one and the same value.
        """
        self._check_scale(values)
        self._check_constant([i for i, value in enumerate(values) if not math.isnan(value)], values, completions)

    def _check_scale(self, values: Sequence[float]) -> None:
        largest = max((abs(value) for value in values if not math.isnan(value)), default=0.0)
        if largest > LARGE and not self._large:
            self._large = True
            warnings.warn(
                f"reward function {self.name!r} returned a value of size {largest:g}. Rewards beyond {LARGE:g} swamp "
                "the other functions; scale it to about 1.",
                stacklevel=4,
            )

    def _check_constant(self, rows: Sequence[int], values: Sequence[float], completions: Sequence[Completion]) -> None:
        if not rows:
            return
        first = values[rows[0]]
        if any(values[i] != first for i in rows):
            self._batches = 0
            return
        self._batches = self._batches + 1 if first == self._value else 1
        self._value = first
        if self._batches not in (CONSTANT, self.constant_limit):
            return
        told = (
            f"reward function {self.name!r} returned {first:g} for every completion of {self._batches} batches in a "
            "row: it teaches nothing. Look at what it is given; the last completion starts "
            f"{text_of(completions[rows[-1]])[:80]!r}."
        )
        if self._batches == self.constant_limit:
            raise RewardError(f"{told} The run ends because of reward.constant_limit={self.constant_limit}.")
        warnings.warn(told, stacklevel=5)
