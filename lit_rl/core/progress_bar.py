"""A progress bar that appears only after two seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from lightning.pytorch.utilities import rank_zero_only
from tqdm.auto import tqdm

PROGRESS_DELAY = 2.0
"""Seconds until the bar appears."""

T = TypeVar("T")


def delayed_progress(items: Iterable[T], what: str, unit: str) -> Iterator[T]:
    """Yield the items, and after two seconds show a progress bar with the count and the remaining time.

    The bar is shown in a terminal or a notebook, on rank 0, and removed at the end.

    Args:
        items: A sized iterable, if the remaining time is to be shown.
        what: The text before the bar, such as "tokenising".
        unit: The name of an item, such as "row".
    """
    elsewhere = getattr(rank_zero_only, "rank", 0) != 0
    return iter(tqdm(items, desc=what, unit=unit, delay=PROGRESS_DELAY, leave=False, disable=elsewhere or None))
