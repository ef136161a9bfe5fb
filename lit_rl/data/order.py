"""The order of rows, and the size of a step.

The order is a pure function of (seed, epoch): the same on every rank and after every resume.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, DataError
from lit_rl.ops.ranges import AtLeastOne, AtLeastZero

_WITHIN, _BETWEEN = 0, 1


@checked("data")
@dataclass(frozen=True)
class RolloutOrder:
    """The order of rows in every epoch.

    An epoch draws as many rows as there are. A source gets its share by weight and draws from its own stream: one
    permutation of its rows after another, over all epochs, so no row is repeated before every row of the source
    was drawn once. Rows that do not fill a last rollout are left out of the epoch.

    Args:
        sizes: Rows of each source; a row's index counts over the sources in this order.
        prompts_per_rollout: Prompts of one rollout, all ranks together.
        seed: Seed of every permutation, from 0.
        shuffle: Off, every epoch has the same order: each source from its first row, sources evenly mixed.
        weights: Relative share of each source; None is by size, so that an epoch is every row once.
    """

    sizes: tuple[int, ...]
    prompts_per_rollout: AtLeastOne
    seed: AtLeastZero = 0
    shuffle: bool = True
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rollouts_per_epoch == 0:
            raise DataError(
                f"data.prompts_per_rollout={self.prompts_per_rollout} needs as many rows; there are {sum(self.sizes)}."
            )
        for i, quota in enumerate(self.quotas):
            if quota == 0:
                raise ConfigError(
                    f"data.sources[{i}]: no row of it is drawn in an epoch of {sum(self.sizes)}: raise its weight."
                )

    @property
    def rollouts_per_epoch(self) -> int:
        return sum(self.sizes) // self.prompts_per_rollout

    @property
    def quotas(self) -> list[int]:
        """Rows that an epoch draws of each source: largest remainders, so they sum to all rows."""
        return apportion(sum(self.sizes), self.sizes if self.weights is None else self.weights)

    def epoch(self, epoch: int) -> list[int]:
        """Return the row indices of an epoch, whole rollouts only."""
        first_row = np.cumsum([0, *self.sizes])
        drawn = [first_row[i] + self._draw(i, quota, epoch) for i, quota in enumerate(self.quotas)]
        if not self.shuffle:
            place = np.concatenate([(np.arange(len(rows)) + 0.5) / len(rows) for rows in drawn])
            mixed = np.concatenate(drawn)[np.argsort(place, kind="stable")]
        elif len(drawn) == 1:
            mixed = drawn[0]
        else:
            mixed = self._random(_BETWEEN, epoch).permutation(np.concatenate(drawn))
        return mixed[: self.rollouts_per_epoch * self.prompts_per_rollout].tolist()

    def _draw(self, source: int, quota: int, epoch: int) -> np.ndarray:
        size = self.sizes[source]
        if not self.shuffle:
            return np.arange(quota) % size
        start = epoch * quota
        cycles = range(start // size, (start + quota - 1) // size + 1)
        stream = np.concatenate([self._random(_WITHIN, source, cycle).permutation(size) for cycle in cycles])
        return stream[start % size : start % size + quota]

    def _random(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])


def apportion(count: int, weights: Sequence[float]) -> list[int]:
    """Apportion `count` by weight: largest remainders, so the parts sum to `count`."""
    exact = [count * weight / sum(weights) for weight in weights]
    parts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: parts[i] - exact[i])
    for i in by_remainder[: count - sum(parts)]:
        parts[i] += 1
    return parts


def count_occurrences(rows: list[int]) -> list[int]:
    """Return, for each row, the number of times the same row stands earlier in the list."""
    seen: Counter[int] = Counter()
    occurrences = []
    for row in rows:
        occurrences.append(seen[row])
        seen[row] += 1
    return occurrences


DEFAULT_STEP_ROWS = 32
"""Rows of a step where the user chose no number."""


def fit_step_rows(rows: int, size: int, unit: int = 1) -> int | None:
    """Return the rows of the largest step of at most `size` that a set fills, or of the smallest where every step is
    larger; None where that is `size` itself, or no step can be filled.

    Args:
        rows: Rows of the set, without those that are held out.
        size: Rows of a step, where there are as many.
        unit: Number that the rows of a step must be a multiple of.
    """
    fits = min(rows, max(size, unit)) // unit * unit
    return fits if fits not in (0, size) else None
