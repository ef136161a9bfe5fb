"""All sets of a run that learns from a data set: training rows by source, validation sets by name, and the counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_rl.data.corpus import Report, list_counts, set_key
from lit_rl.data.offline.example import Example, Kind
from lit_rl.data.offline.example_set import ExampleSet
from lit_rl.data.offline.packing import packed
from lit_rl.data.offline.read import ExampleOptions, read_examples
from lit_rl.data.sources import Rows
from lit_rl.data.splits import hold_out, prompt_key
from lit_rl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ExampleCorpus:
    """What a data module serves."""

    train: ExampleSet
    sizes: tuple[int, ...]
    """Training rows of each source; `train` has the sources one after another."""
    val: Mapping[str, ExampleSet]
    report: Report
    formats: tuple[str, ...]
    """The detected format of each source."""


def read_example_corpus(
    train: Sequence[Rows],
    val: Mapping[str, Rows],
    tokenizer: PreTrainedTokenizerBase,
    kind: Kind,
    options: ExampleOptions,
    *,
    val_fraction: float = 0.0,
    seed: int = 0,
) -> ExampleCorpus:
    """Read, filter and count every set, hold out a share of the prompts as an unnamed `val`, and pack what is packed.

    The report has the counts of `read_examples`; for `train` also `held_out`, which `kept` leaves out, and for packed
    sets `packed_rows`.

    Raises:
        DataError: a row or a whole set cannot be used; a set has no rows left.
    """
    report: Report = {}
    sources, formats = [], []
    for rows in train:
        examples, found = _examples(rows, tokenizer, kind, options, report, "train")
        sources.append(examples)
        formats.append(found)
    held_out = {name: _examples(rows, tokenizer, kind, options, report, set_key(name))[0] for name, rows in val.items()}
    report["train"]["held_out"] = 0
    if not any(sources):
        raise DataError(f"No row is left to train on: {list_counts(report['train'])}.")
    if val_fraction > 0:
        sources, held = hold_out(sources, val_fraction, seed, _key)
        held_out[""] = held
        report["train"]["held_out"] = len(held)
        report["train"]["kept"] = sum(map(len, sources))
        report["val"] = {"rows": len(held), "kept": len(held)}
    assert isinstance(tokenizer.pad_token_id, int)
    make = _set_maker(kind, tokenizer.pad_token_id, options)
    parts = [make(examples) for examples in sources]
    sets = {name: make(examples) for name, examples in held_out.items()}
    train_set = _joined(parts)
    for name, examples in sets.items():
        counts = report[set_key(name)]
        if not len(examples):
            raise DataError(f"The validation set {set_key(name)} has no rows left: {list_counts(counts)}.")
        seen = {_key(example) for example in train_set.examples}
        counts["overlap"] = sum(_key(example) in seen for example in examples.examples)
    if options.packing != "none":
        for key, examples in {"train": train_set, **{set_key(name): s for name, s in sets.items()}}.items():
            report[key]["packed_rows"] = len(examples)
    return ExampleCorpus(train_set, tuple(map(len, parts)), sets, report, tuple(formats))


def _set_maker(kind: Kind, pad_id: int, options: ExampleOptions) -> Callable[[Sequence[Example]], ExampleSet]:
    def make(examples: Sequence[Example]) -> ExampleSet:
        if options.packing == "none":
            return ExampleSet(kind, examples, pad_id)
        assert options.max_length is not None
        return ExampleSet(kind, examples, pad_id, packed(examples, options.max_length, options.packing))

    return make


def _joined(parts: Sequence[ExampleSet]) -> ExampleSet:
    examples = [example for part in parts for example in part.examples]
    first = parts[0]
    packs = None if first.packs is None else [pack for part in parts for pack in part.packs or ()]
    return ExampleSet(first.kind, examples, first.pad_id, packs)


def _examples(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, kind: Kind, options: ExampleOptions, report: Report, key: str
) -> tuple[list[Example], str]:
    examples, counts, found = read_examples(rows, tokenizer, kind, options)
    total = report.setdefault(key, {})
    for name, count in counts.items():
        before = total.get(name, 0)
        total[name] = max(before, count) if name.startswith("longest") else before + count
    return examples, found


def _key(example: Example) -> str:
    """Equal for rows of equal prompts; a text without a prompt is its own."""
    return json.dumps(example.texts[0].ids) if example.prompt is None else prompt_key(example.prompt)
