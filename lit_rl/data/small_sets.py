"""The default number of rows of a step, lowered to the size of a small set."""

from __future__ import annotations

DEFAULT = 32
"""Rows of a step where the user chose no number."""


def fitting(rows: int, size: int, unit: int = 1) -> int | None:
    """Return the rows of the largest step of at most `size` that a set fills, or of the smallest where every step is
    larger; None where that is `size` itself, or no step can be filled.

    Args:
        rows: Rows of the set, without those that are held out.
        size: Rows of a step, where there are as many.
        unit: Number that the rows of a step must be a multiple of.
    """
    fits = min(rows, max(size, unit)) // unit * unit
    return fits if fits not in (0, size) else None
