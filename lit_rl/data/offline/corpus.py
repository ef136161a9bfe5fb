"""All sets of a run that learns from a data set: training rows by source, validation sets by name, and the counts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_rl.data.corpus import Report, list_counts, set_key
from lit_rl.data.image_prompts import Processor
from lit_rl.data.offline.encode import Encoder
from lit_rl.data.offline.example import Example, Kind
from lit_rl.data.offline.example_set import ExampleSet
from lit_rl.data.offline.options import ExampleOptions
from lit_rl.data.offline.packing import packed
from lit_rl.data.offline.read import add_counts, read_examples
from lit_rl.data.sources import Rows
from lit_rl.data.splits import hold_out, prompt_key
from lit_rl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ExampleCorpus:
    """The training and validation examples that a data module serves."""

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
    encoder: Encoder,
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

    def read(rows: Rows, key: str) -> tuple[list[Example], str]:
        return _examples(rows, encoder, kind, options, report, key)

    found = [read(rows, "train") for rows in train]
    sources, formats = [examples for examples, _ in found], [name for _, name in found]
    held_out = {name: read(rows, set_key(name))[0] for name, rows in val.items()}
    report["train"]["held_out"] = 0
    if not any(sources):
        raise DataError(f"No row is left to train on: {list_counts(report['train'])}.")
    if val_fraction > 0:
        sources, held = hold_out(sources, val_fraction, seed, _key)
        report["train"]["held_out"] = len(held)
        report["train"]["kept"] = sum(map(len, sources))
        if held:  # a single row is trained on
            held_out[""] = held
            report["val"] = {"rows": len(held), "kept": len(held)}
    train_set, sizes = training_set(sources, kind, pad_id(encoder.tokenizer), options, encoder.processor)
    return _corpus(train_set, sizes, held_out, report, tuple(formats), options)


def streamed_corpus(
    train: ExampleSet,
    sizes: tuple[int, ...],
    formats: tuple[str, ...],
    val: Mapping[str, Rows],
    encoder: Encoder,
    options: ExampleOptions,
) -> ExampleCorpus:
    """Build the corpus of a stream: `train` is its beginning, packed already.

    The report has no counts of the training rows: they grow as the stream is read.

    Raises:
        DataError: a row or a whole set cannot be used; a validation set has no rows left.
    """
    report: Report = {"train": {}}
    held_out = {
        name: _examples(rows, encoder, train.kind, options, report, set_key(name))[0] for name, rows in val.items()
    }
    return _corpus(train, sizes, held_out, report, formats, options)


def training_set(
    sources: Sequence[Sequence[Example]],
    kind: Kind,
    pad: int,
    options: ExampleOptions,
    processor: Processor | None = None,
) -> tuple[ExampleSet, tuple[int, ...]]:
    """Return the rows of all sources, each packed by itself where rows are packed, and the size of each."""
    parts = [_set(examples, kind, pad, options, processor) for examples in sources]
    return _joined(parts), tuple(map(len, parts))


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that batches are padded with."""
    assert isinstance(tokenizer.pad_token_id, int)
    return tokenizer.pad_token_id


def _corpus(
    train_set: ExampleSet,
    sizes: tuple[int, ...],
    held_out: Mapping[str, Sequence[Example]],
    report: Report,
    formats: tuple[str, ...],
    options: ExampleOptions,
) -> ExampleCorpus:
    how = train_set.kind, train_set.pad_id, options, train_set.processor
    sets = {name: _set(rows, *how) for name, rows in held_out.items()}
    for name, examples in sets.items():
        counts = report[set_key(name)]
        if not len(examples):
            raise DataError(f"The validation set {set_key(name)} has no rows left: {list_counts(counts)}.")
        seen = {_key(example) for example in train_set.examples}
        counts["overlap"] = sum(_key(example) in seen for example in examples.examples)
    if options.packing != "none":
        for key, examples in {"train": train_set, **{set_key(name): s for name, s in sets.items()}}.items():
            report[key]["packed_rows"] = len(examples)
    return ExampleCorpus(train_set, sizes, sets, report, formats)


def _set(
    examples: Sequence[Example], kind: Kind, pad: int, options: ExampleOptions, processor: Processor | None
) -> ExampleSet:
    if options.packing == "none":
        return ExampleSet(kind, examples, pad, processor=processor)
    if seeing := next((example for example in examples if example.shown), None):
        raise ConfigError(
            f"{seeing.where}: the row has images, and data.packing={options.packing} puts texts together: set it to "
            "none."
        )
    assert options.max_length is not None
    return ExampleSet(kind, examples, pad, packed(examples, options.max_length, options.packing))


def _joined(parts: Sequence[ExampleSet]) -> ExampleSet:
    examples = [example for part in parts for example in part.examples]
    first = parts[0]
    packs = None if first.packs is None else [pack for part in parts for pack in part.packs or ()]
    return ExampleSet(first.kind, examples, first.pad_id, packs, first.processor)


def _examples(
    rows: Rows,
    encoder: Encoder,
    kind: Kind,
    options: ExampleOptions,
    report: Report,
    key: str,
) -> tuple[list[Example], str]:
    examples, counts, found = read_examples(rows, encoder, kind, options)
    report[key] = dict(add_counts(report.get(key, {}), counts))
    return examples, found


def _key(example: Example) -> str:
    """Return a key that is equal for rows of equal prompts; a text without a prompt is its own."""
    return json.dumps(example.texts[0].ids) if example.prompt is None else prompt_key(example.prompt, example.shown)
