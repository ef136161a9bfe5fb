"""A reward that completions of any policy differ in."""

from __future__ import annotations


def digits(completions: list[str], **columns: object) -> list[float]:
    """How many digits each has."""
    return [float(sum(map(str.isdigit, text))) for text in completions]
