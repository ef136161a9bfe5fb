"""What it brings that rows of like length share a micro-batch: the tokens of forward passes, padding included, counted.

    python scripts/padding.py

Nothing is run: `ExampleLoader` cuts steps of rows whose lengths are log-normal, as those of chat data are roughly.
"""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table

from lit_rl.data.example_set import Encoded, Example, ExampleSet
from lit_rl.data.loaders import ExampleLoader
from lit_rl.data.order import RolloutOrder
from lit_rl.models.forward_inputs import bucket_by_length

ROWS, MEDIAN, SPREAD, MOST = 6400, 250, 0.8, 1024
"""Of the set: its rows, tokens of the median row, standard deviation of the logarithm, and `data.max_length`."""

CUTS = [(16, 2), (64, 8), (64, 16), (64, 32)]
"""Rows of a step, and its micro-batches."""


def texts() -> ExampleSet:
    lengths = np.random.default_rng(0).lognormal(np.log(MEDIAN), SPREAD, ROWS).astype(int).clip(8, MOST)
    rows = [Example((Encoded([1] * n, [True] * n, 0),), "") for n in lengths.tolist()]
    return ExampleSet("texts", rows, pad_id=0)


def tokens(data: ExampleSet, batch_size: int, accumulate: int, group_by_length: bool) -> list[float]:
    """Tokens of an epoch as parts of those of its texts, and tokens of the largest micro-batch on the mean of steps:
    first where a micro-batch is one call, then where its rows run in calls by length on a CPU."""
    order = RolloutOrder((len(data),), batch_size)
    loader = ExampleLoader(data, order, accumulate=accumulate, group_by_length=group_by_length)
    texts, padded, in_calls = [], [], []
    for batch in loader:
        lengths = batch.tokens.attention_mask.sum(1)
        texts.append(int(lengths.sum()))
        padded.append(batch.tokens.input_ids.numel())
        in_calls.append(sum(call.width * len(call.rows) for call in bucket_by_length(lengths)))
    sums = [sum(found) / sum(texts) for found in (padded, in_calls)]
    return [*sums, *(float(np.reshape(found, (-1, accumulate)).max(1).mean()) for found in (padded, in_calls))]


def main() -> None:
    data = texts()
    table = Table("rows", "cut into", "by length", "one call", "in calls", "largest, one call", "largest, in calls")
    for batch_size, accumulate in CUTS:
        for group_by_length in (False, True):
            one, calls, largest, in_calls = tokens(data, batch_size, accumulate, group_by_length)
            figures = f"{one:.2f}", f"{calls:.2f}", f"{largest:,.0f}", f"{in_calls:,.0f}"
            table.add_row(str(batch_size), str(accumulate), str(group_by_length).lower(), *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
