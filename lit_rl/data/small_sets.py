"""A step takes as many rows as a small set has, where nobody said how many it takes."""

from __future__ import annotations

from typing import Any, Self

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


class NotesKeywords:
    """A class that notes which of its keywords came: a default of 32 and a typed 32 look the same to `__init__`.

    The note is taken in `__new__`, so that signatures, which schemas and LightningCLI read, stay as they are.
    """

    _given_names: frozenset[str] = frozenset()

    def __new__(cls, *arguments: Any, **given: Any) -> Self:
        made = super().__new__(cls)
        made._given_names = frozenset(given)
        return made
