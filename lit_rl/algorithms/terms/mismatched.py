"""The mismatched completions of KTO's baseline, for a whole run: the order of rows determines the pairs.

`ExampleSet.before` pairs the rows of a step, so every epoch has other pairs, all of them known before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_rl.algorithms.terms.precomputed_reference import texts_of
from lit_rl.data.offline.example import Encoded, Example
from lit_rl.data.offline.example_set import ExampleSet
from lit_rl.errors import ConfigError

Steps = Iterable[Sequence[int]]
"""The row indices of every optimizer step, over all ranks."""


@dataclass(frozen=True)
class RunLength:
    """The Trainer's limits on the length of a run; -1 is no limit."""

    max_steps: int
    max_epochs: int | None
    limit_train_batches: int | float = 1.0

    @classmethod
    def of(cls, trainer: Any) -> RunLength:
        return cls(trainer.max_steps, trainer.max_epochs, trainer.limit_train_batches)

    def check(self) -> None:
        """Refuse a run without an end.

        Raises:
            ConfigError: no limit ends the run, so that its steps cannot all be computed before the first.
        """
        if self.max_steps < 0 and (self.max_epochs or -1) < 0:
            raise ConfigError(
                "algo.precompute_reference=true asks the reference about the mismatched completions of every step of "
                "the run, and nothing says how many there are: set trainer.max_steps or trainer.max_epochs, or take "
                "algo/verdict=apo_zero_unpaired, which has no baseline."
            )

    def epochs(self, loader: Any) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield number and `Steps` of every epoch that the run will reach, of an `ExampleLoader`."""
        limit, size = self.limit_train_batches, loader.order.prompts_per_rollout
        batches = int(len(loader) * limit) if isinstance(limit, float) else min(limit, len(loader))
        each, left = -(-batches // loader.slots), self.max_steps
        epoch = 0
        while (left < 0 or left > 0) and epoch != self.max_epochs and each:
            count = each if left < 0 else min(each, left)
            rows = loader.order.epoch(epoch)
            yield epoch, [rows[step * size : (step + 1) * size] for step in range(count)]
            epoch, left = epoch + 1, max(0, left - count) if left > 0 else left


def mismatched_texts(
    train: ExampleSet, epochs: Iterable[tuple[int, Steps]], val: Mapping[str, ExampleSet]
) -> Iterator[tuple[str, ExampleSet]]:
    """Yield each epoch's prompts with their mismatched completions, as texts; then those of validation.

    Each epoch is a separate set, so that a longer run finds the files of a shorter one.
    """
    for epoch, steps in epochs:
        yield f"the mismatched completions of epoch {epoch}", _texts_of(train, steps)
    for name, data in val.items():
        yield f"the mismatched completions of val/{name}".removesuffix("/"), _texts_of(data, [range(len(data))])


def _texts_of(data: ExampleSet, steps: Steps) -> ExampleSet:
    """Return the mismatched texts that the set puts into the batches of these steps."""
    texts = [text for rows in steps for text in _mismatched(data, rows)]
    return ExampleSet("texts", [Example((text,), "") for text in texts], data.pad_id)


def _mismatched(data: ExampleSet, rows: Sequence[int]) -> Iterator[Encoded]:
    batch: Any = data.batch(rows, data.before(rows), data.totals(rows), step=0, slot=0)
    return (Encoded(ids, learned, 0) for ids, learned in texts_of(batch.mismatched))
