"""The reward of both sides, a function of the sampled token ids. The standard library alone: it runs in a worker."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any


def score(completion_ids: Sequence[Sequence[int]], dead: Sequence[int], **columns: Any) -> list[float]:
    """The share of odd tokens; 0 for every completion of a prompt that is `dead`.

    Args:
        completion_ids: Token ids of each completion.
        dead: The prompt's column of that name, one value a completion.
        columns: What else both sides hand over.
    """
    return [float(exact(ids, bool(off))) for ids, off in zip(completion_ids, dead)]


def exact(ids: Sequence[int], dead: bool) -> Fraction:
    """The reward of one completion."""
    return Fraction(0 if dead else sum(i & 1 for i in ids), len(ids))
