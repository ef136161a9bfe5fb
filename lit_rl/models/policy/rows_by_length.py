"""Rows of like length run together, so that the short ones are not padded to the longest.

A pass over b rows costs b times its longest row. Cut into k calls of neighbours in length it costs the sum over calls
of their rows times their longest, and k times what a call costs beside its tokens. Rows do not see each other, so the
numbers are the same; the graphs of the calls are one graph, with one backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_rl.transfers import to_device

CALL_ON_CPU, CALL_ON_GPU = 64, 4096
"""Tokens that could run in the time that a call takes beside its tokens."""

MOST_CALLS = 8


@dataclass(frozen=True)
class Call:
    """Rows of like length, which run in one call of the model."""

    rows: Tensor
    """Long, in the host's memory: their numbers."""
    width: int
    """Columns of the longest."""


def by_length(lengths: Tensor, device: torch.device) -> list[Call]:
    """Return the calls in which a pass over rows is cheapest, from long rows to short ones; often one.

    Args:
        lengths: Long ``(b,)``, in the host's memory: columns that each row needs, b at least 1.
        device: Where the pass runs.
    """
    order = lengths.argsort(descending=True, stable=True)
    falling = lengths[order].tolist()
    beside = CALL_ON_CPU if device.type == "cpu" else CALL_ON_GPU
    costs = {calls: _cost(falling, calls) + calls * beside for calls in range(1, min(MOST_CALLS, len(falling)) + 1)}
    calls = min(costs, key=lambda number: (costs[number], number))
    return [Call(rows, int(falling[start])) for rows, start in zip(order.tensor_split(calls), _starts(falling, calls))]


def at_most(calls: Sequence[Call], most: int) -> list[Call]:
    """Split calls into calls of at most ``most`` rows."""
    return [Call(rows, call.width) for call in calls for rows in call.rows.split(most)]


def _starts(falling: list[int], calls: int) -> list[int]:
    """Return the places where `tensor_split` cuts, the end included."""
    size, more = divmod(len(falling), calls)
    return [i * size + min(i, more) for i in range(calls + 1)]


def _cost(falling: list[int], calls: int) -> int:
    """Return the tokens of all calls, padding included."""
    starts = _starts(falling, calls)
    return sum(falling[start] * (stop - start) for start, stop in pairwise(starts))


def together(parts: Sequence[Tensor], calls: Sequence[Call], width: int) -> Tensor:
    """Return ``(b, width)`` of the ``(rows, columns)`` of each call, whose columns are the first ones; 0 in the
    others."""
    wide = torch.cat([F.pad(part, (0, width - part.shape[1])) for part in parts])
    order = torch.cat([call.rows for call in calls]).argsort()
    return wide.index_select(0, to_device(order, wide.device))
