"""What one reward function said of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_rl.rewards.functions.contract import Part
from lit_rl.rewards.workers.job import Failure


@dataclass
class FunctionScores:
    """The scores of one function for ``b`` completions."""

    values: list[float]
    """NaN where it does not apply."""
    spans: list[list[Part] | None]
    failures: list[Failure | None]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    output: str = ""
    cache_hits: int = 0
    """Completions that the cache knew."""

    def entry(self, i: int) -> tuple[float, list[Part] | None, Failure | None, dict[str, Any]]:
        """Return the result for one completion, in the form that a cache keeps."""
        extras = {column: values[i] for column, values in self.extras.items()}
        return self.values[i], self.spans[i], self.failures[i], extras

    @classmethod
    def from_entries(cls, entries: Sequence[Any], fresh: FunctionScores, cache_hits: int) -> FunctionScores:
        """Concatenate entries; metrics and output are those of the call that made the fresh ones."""
        columns = dict.fromkeys(column for *_, extras in entries for column in extras)
        return cls(
            values=[value for value, _, _, _ in entries],
            spans=[spans for _, spans, _, _ in entries],
            failures=[failure for _, _, failure, _ in entries],
            metrics=fresh.metrics,
            extras={column: [extras.get(column) for *_, extras in entries] for column in columns},
            output=fresh.output,
            cache_hits=cache_hits,
        )
