"""All sets of a run: training rows by source, validation sets by name, and the counts of every filter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lit_rl.core.errors import DataError
from lit_rl.data.encode import Encoder
from lit_rl.data.example_reader import ExampleOptions, example_set, read_examples
from lit_rl.data.example_set import Example, ExampleSet
from lit_rl.data.kinds import Kind
from lit_rl.data.prompt_reader import PromptOptions, read_prompts
from lit_rl.data.prompt_set import PromptExample, PromptSet
from lit_rl.data.set_reader import add_counts, list_counts
from lit_rl.data.sources import Rows
from lit_rl.data.splits import hold_out

Report = dict[str, dict[str, int]]
"""Counts by set: `train`, and `val` or `val/<name>`."""

Row = TypeVar("Row", PromptExample, Example)
RowSet = TypeVar("RowSet", PromptSet, ExampleSet)


@dataclass(frozen=True)
class Corpus(Generic[RowSet]):
    """The training and validation rows that a data module serves."""

    train: RowSet
    sizes: tuple[int, ...]
    """Training rows of each source; `train` has the sources one after another."""
    val: Mapping[str, RowSet]
    report: Report
    formats: tuple[str, ...]
    """The detected format of each source; empty names for prompts."""


@dataclass
class CorpusReader(Generic[Row, RowSet]):
    """A reader of all sources of a run: filters, counts, the rows that are held out.

    Args:
        read: Reads a source: its rows, the counts of every filter, and the name of its format.
        build: Makes one set of the rows of several sources; with it the size of each.
        packed: True if rows of a set are packed: they are then counted as `packed_rows`.
    """

    read: Callable[[Rows], tuple[list[Row], Mapping[str, int], str]]
    build: Callable[[Sequence[Sequence[Row]]], tuple[RowSet, tuple[int, ...]]]
    packed: bool = False
    report: Report = field(default_factory=dict)

    def whole(
        self, train: Sequence[Rows], val: Mapping[str, Rows], *, val_fraction: float = 0.0, seed: int = 0
    ) -> Corpus[RowSet]:
        """Read, filter and count every set, and hold out a share of the training prompts as an unnamed `val`.

        The report has the counts of `SetReader.read`; for `train` also `held_out`, which `kept` leaves out; for
        validation sets also `overlap`, the rows whose prompt a training row has; for packed sets `packed_rows`.

        Raises:
            DataError: a row or a whole set cannot be used; a set has no rows left.
        """
        found = [self._examples(rows, "train") for rows in train]
        sources, formats = [rows for rows, _ in found], tuple(name for _, name in found)
        held_out = self._held_out(val)
        counts = self.report["train"]
        counts["held_out"] = 0
        if not any(sources):
            raise DataError(f"No row is left to train on: {list_counts(counts)}.")
        if val_fraction > 0:
            sources, held = hold_out(sources, val_fraction, seed, lambda row: row.key)
            counts |= {"held_out": len(held), "kept": sum(map(len, sources))}
            if held:  # a single row is trained on
                held_out[""] = held
                self.report["val"] = {"rows": len(held), "kept": len(held)}
        train_set, sizes = self.build(sources)
        return self._corpus(train_set, sizes, {row.key for rows in sources for row in rows}, held_out, formats)

    def streamed(
        self, train: RowSet, sizes: tuple[int, ...], keys: Set[str], formats: tuple[str, ...], val: Mapping[str, Rows]
    ) -> Corpus[RowSet]:
        """Return the corpus of a stream: `train` is its beginning, whose rows have these keys.

        The report has no counts of the training rows: they grow as the stream is read.

        Raises:
            DataError: a row or a whole set cannot be used; a validation set has no rows left.
        """
        self.report["train"] = {}
        return self._corpus(train, sizes, keys, self._held_out(val), formats)

    def _examples(self, rows: Rows, key: str) -> tuple[list[Row], str]:
        examples, counts, name = self.read(rows)
        self.report[key] = dict(add_counts(self.report.get(key, {}), counts))
        return examples, name

    def _held_out(self, val: Mapping[str, Rows]) -> dict[str, list[Row]]:
        return {name: self._examples(rows, set_key(name))[0] for name, rows in val.items()}

    def _corpus(
        self,
        train: RowSet,
        sizes: tuple[int, ...],
        seen: Set[str],
        held_out: Mapping[str, list[Row]],
        formats: tuple[str, ...],
    ) -> Corpus[RowSet]:
        for name, rows in held_out.items():
            counts = self.report[set_key(name)]
            if not rows:
                raise DataError(f"The validation set {set_key(name)} has no rows left: {list_counts(counts)}.")
            counts["overlap"] = sum(row.key in seen for row in rows)
        val = {name: self.build([rows])[0] for name, rows in held_out.items()}
        if self.packed:
            for key, rows in {"train": train, **{set_key(name): each for name, each in val.items()}}.items():
                self.report[key]["packed_rows"] = len(rows)
        return Corpus(train, sizes, val, self.report, formats)


def prompt_reader(encoder: Encoder, options: PromptOptions) -> CorpusReader[PromptExample, PromptSet]:
    """Return the reader of a corpus of prompts to be answered."""

    def build(sources: Sequence[Sequence[PromptExample]]) -> tuple[PromptSet, tuple[int, ...]]:
        rows = [row for source in sources for row in source]
        return PromptSet.of(rows, encoder.processor), tuple(map(len, sources))

    return CorpusReader(lambda rows: (*read_prompts(rows, encoder, options), ""), build)


def example_reader(encoder: Encoder, kind: Kind, options: ExampleOptions) -> CorpusReader[Example, ExampleSet]:
    """Return the reader of a corpus of examples that are learned from as they are."""
    return CorpusReader(
        lambda rows: read_examples(rows, encoder, kind, options),
        lambda sources: example_set(sources, encoder, kind, options),
        packed=options.packing != "none",
    )


def set_key(name: str) -> str:
    """Return the name of a validation set in a report."""
    return f"val/{name}" if name else "val"
