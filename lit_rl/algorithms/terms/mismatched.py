"""The completions that KTO's baseline is taken from, of a whole run: who is beside whom follows from the order of rows.

`ExampleSet.before` pairs the rows of a step, so every epoch has other pairs, all of them known before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import lightning as L

from lit_rl.algorithms.terms.precomputed_reference import texts_of
from lit_rl.data.offline.example import Encoded, Example
from lit_rl.data.offline.example_set import ExampleSet
from lit_rl.errors import ConfigError

if TYPE_CHECKING:
    from lit_rl.algorithms.loop.offline import OfflineModule


def refuse_endless(trainer: L.Trainer) -> None:
    """
    Raises:
        ConfigError: nobody says when the run ends, so that not all its steps can be looked at before the first.
    """
    if trainer.max_steps < 0 and (trainer.max_epochs or -1) < 0:
        raise ConfigError(
            "algo.precompute_reference=true asks the reference about the mismatched completions of every step of the "
            "run, and nothing says how many there are: set trainer.max_steps or trainer.max_epochs, or take "
            "algo/verdict=apo_zero_unpaired, which has no baseline."
        )


def of_run(module: OfflineModule) -> Iterator[tuple[str, ExampleSet]]:
    """Each epoch's prompts with the completions that they are compared with, as texts; then those of validation.

    An epoch is a set of its own, so that a run that goes on longer finds those it had.
    """
    data: Any = module.trainer.datamodule  # pyright: ignore
    for epoch, steps in _epochs(module.trainer, data.train_dataloader()):
        yield f"the mismatched completions of epoch {epoch}", _texts_of(data.corpus.train, steps)
    for name, held_out in data.corpus.val.items():
        yield f"the mismatched completions of val/{name}".removesuffix("/"), _texts_of(held_out, [range(len(held_out))])


def _epochs(trainer: L.Trainer, loader: Any) -> Iterator[tuple[int, list[list[int]]]]:
    """The rows of every step of every epoch that the Trainer will reach, over all ranks."""
    limit, size = trainer.limit_train_batches, loader.order.prompts_per_rollout
    batches = int(len(loader) * limit) if isinstance(limit, float) else min(limit, len(loader))
    each, left = -(-batches // loader.slots), trainer.max_steps
    epoch = 0
    while (left < 0 or left > 0) and epoch != trainer.max_epochs and each:
        count = each if left < 0 else min(each, left)
        rows = loader.order.epoch(epoch)
        yield epoch, [rows[step * size : (step + 1) * size] for step in range(count)]
        epoch, left = epoch + 1, max(0, left - count) if left > 0 else left


def _texts_of(data: ExampleSet, steps: Iterable[Sequence[int]]) -> ExampleSet:
    """What the set itself puts into the batches of these steps."""
    texts = [text for rows in steps for text in _mismatched(data, rows)]
    return ExampleSet("texts", [Example((text,), "") for text in texts], data.pad_id)


def _mismatched(data: ExampleSet, rows: Sequence[int]) -> Iterator[Encoded]:
    batch: Any = data.batch(rows, data.before(rows), data.totals(rows), step=0, slot=0)
    return (Encoded(ids, learned, 0) for ids, learned in texts_of(batch.mismatched))
