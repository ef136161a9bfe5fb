"""A bar where something takes longer than a person waits without a word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from lightning.pytorch.utilities import rank_zero_only
from tqdm.auto import tqdm

PATIENCE = 2.0
"""Seconds without a word."""

T = TypeVar("T")


def counted(items: Iterable[T], what: str, unit: str) -> Iterator[T]:
    """Yield the items, and after two seconds show a progress bar with the count and the remaining time.

    The bar is for a terminal or a notebook, of rank 0, and goes when the items have ended.

    Args:
        items: Of which the number is known, if the time that is left is to be said.
        what: Stands before the bar, such as "tokenising".
        unit: What an item is, such as "row".
    """
    elsewhere = getattr(rank_zero_only, "rank", 0) != 0
    return iter(tqdm(items, desc=what, unit=unit, delay=PATIENCE, leave=False, disable=elsewhere or None))
