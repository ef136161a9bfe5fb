"""The tables of all ranks, joined on rank 0."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch

from lit_rl.algorithms.ranks import sharing_rows
from lit_rl.callbacks.unwritten import Unwritten

Table = dict[str, list[Any]]


def of_all_ranks(trainer: L.Trainer, mine: Any, unwritten: Unwritten) -> list[Any]:
    """Gather a value of every rank with rows of its own on rank 0, in the order of ranks; elsewhere an empty list.

    A collective. None stands for a value that could not be sent, such as a reward's extra that cannot be pickled.
    """
    if trainer.world_size == 1:
        return [mine]
    sent = pickle.dumps(None)
    with unwritten.spared("sending rows to rank 0"):
        sent = pickle.dumps(mine)
    parts = [b""] * trainer.world_size if trainer.is_global_zero else None
    torch.distributed.gather_object(sent, parts, dst=0)
    return [_received(part, unwritten) for part in (parts or [])[:: sharing_rows(trainer)]]


def _received(part: bytes, unwritten: Unwritten) -> Any:
    with unwritten.spared("taking rows of another rank"):
        return pickle.loads(part)
    return None


def stacked(tables: Sequence[Mapping[str, list[Any]] | None]) -> Table:
    """Join the rows of every rank, in the order of ranks, with a column `rank` after `step` unless the data has one.

    A column that a rank lacks, such as an extra that its rewards did not log, is None there.
    """
    there = [(rank, table) for rank, table in enumerate(tables) if table]
    names = dict.fromkeys(name for _, table in there for name in table)
    whole: Table = {"step": [], "rank": [], **{name: [] for name in names}}
    for rank, table in there:
        rows = len(table["prompt"])
        for name, values in whole.items():
            values.extend(table.get(name) or [rank if name == "rank" else None] * rows)
    return whole


def of_a_set(parts: Sequence[tuple[Table, Sequence[int | None]] | None]) -> Table:
    """Join the validation of one data set over the ranks, each of its rows once and in its order.

    Where the set does not divide over the ranks, some of them complete a row that another has.

    Args:
        parts: For every rank its table, with the data set's row of each table row; None where that is unknown.
    """
    whole = stacked([part and part[0] for part in parts])
    found = [(row, rank) for rank, part in enumerate(parts) if part for row in part[1]]
    first: dict[int | None, int] = {}
    for row, rank in found:
        first.setdefault(row, rank)
    places = [i for i, (row, rank) in enumerate(found) if row is None or first[row] == rank]
    places.sort(key=lambda i: -1 if (row := found[i][0]) is None else row)
    return {name: [values[i] for i in places] for name, values in whole.items()}
