"""A step takes as many rows as a small set has, where nobody said how many it takes."""

from __future__ import annotations

DEFAULT = 32
"""Rows of a step, where there are as many and nobody chose another number."""


def fitting(rows: int, size: int, unit: int = 1) -> int | None:
    """The rows of the largest step that a set fills; None where it fills `size`, or no step at all.

    Args:
        rows: Of the set, without those that are held out.
        size: Rows of a step, where there are as many.
        unit: What the rows of a step have to be a multiple of.
    """
    fits = rows // unit * unit
    return fits if 1 <= fits < size else None
