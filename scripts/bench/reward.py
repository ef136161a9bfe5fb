"""The reward of both sides, a function of the sampled token ids. The standard library alone: it runs in a worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

SECONDS = 0.01
"""That `slow` takes for a completion: a short program that runs, or a quick answer of a server."""


def score(completion_ids: Sequence[Sequence[int]], dead: Sequence[int], **columns: Any) -> list[float]:
    """The share of odd tokens; 0 for every completion of a prompt that is `dead`.

    Args:
        completion_ids: Token ids of each completion.
        dead: The prompt's column of that name, one value a completion.
        columns: What else both sides hand over.
    """
    return [float(exact(ids, bool(off))) for ids, off in zip(completion_ids, dead)]


def slow(completion_ids: Sequence[Sequence[int]], dead: Sequence[int], **columns: Any) -> list[float]:
    """`score`, `SECONDS` later for each completion."""
    time.sleep(SECONDS * len(completion_ids))
    return score(completion_ids, dead)


slow.independent_rows = True  # pyright: ignore[reportFunctionMemberAccess]


def exact(ids: Sequence[int], dead: bool) -> Fraction:
    """The reward of one completion."""
    return Fraction(0 if dead else sum(i & 1 for i in ids), len(ids))
