"""A tool that configs of tests name."""

from __future__ import annotations


def double(a: int) -> int:
    """Double a number.

    Args:
        a: The number.
    """
    return 2 * a
