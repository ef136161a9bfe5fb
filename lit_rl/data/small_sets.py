"""A step takes as many rows as a small set has, where nobody said how many it takes."""

from __future__ import annotations

DEFAULT = 32
"""Rows of a step, where there are as many and nobody chose another number."""


def fitting(rows: int, size: int, unit: int = 1) -> int | None:
    """Return the rows of the largest step of at most `size` that a set fills, or of the smallest where every step is
    larger; None where that is `size` itself, or no step can be filled.

    Args:
        rows: Of the set, without those that are held out.
        size: Rows of a step, where there are as many.
        unit: What the rows of a step have to be a multiple of.
    """
    fits = min(rows, max(size, unit)) // unit * unit
    return fits if fits not in (0, size) else None
