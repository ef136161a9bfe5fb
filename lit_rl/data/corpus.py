"""All sets of a run: training rows by source, validation sets by name, and the counts of every filter.

`PromptCorpus` has prompts for rollouts, `ExampleCorpus` examples that are learned from as they are.
"""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_rl.core.errors import ConfigError, DataError
from lit_rl.core.progress_bar import delayed_progress
from lit_rl.data.encode import Encoder, pack_examples
from lit_rl.data.example_reader import ExampleOptions, ExampleReader, reason_to_drop
from lit_rl.data.example_set import Example, ExampleSet
from lit_rl.data.kinds import Kind
from lit_rl.data.prompt_set import PromptExample, PromptOptions, PromptSet, read_prompts
from lit_rl.data.rendering import TemplateOmissions
from lit_rl.data.sources import Rows
from lit_rl.data.splits import hold_out, prompt_key
from lit_rl.data.visual_prompts import Processor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Report = dict[str, dict[str, int]]
"""Counts by set: `train`, and `val` or `val/<name>`."""


@dataclass(frozen=True)
class PromptCorpus:
    """The training and validation prompts that a data module serves."""

    train: PromptSet
    sizes: tuple[int, ...]
    """Training rows of each source; `train` has the sources one after another."""
    val: Mapping[str, PromptSet]
    report: Report


def read_prompt_corpus(
    train: Sequence[Rows],
    val: Mapping[str, Rows],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    *,
    processor: Processor | None = None,
    val_fraction: float = 0.0,
    seed: int = 0,
) -> PromptCorpus:
    """Format, tokenise, filter and count every set, and hold out a share of the training prompts as an unnamed `val`.

    The report has the counts of `read_prompts`; for `train` also `held_out`, which `kept` leaves out; for validation
    sets also `overlap`, the rows whose prompt a training row has.

    Raises:
        DataError: a row or a whole set cannot be used; a validation set has no rows left.
    """
    report: Report = {}
    left_out = TemplateOmissions(tokenizer, options.chat_template_kwargs)

    def examples(rows: Rows, key: str) -> list[PromptExample]:
        found, counts = read_prompts(rows, tokenizer, options, processor, left_out)
        report[key] = dict(add_counts(report.get(key, {}), counts))
        return found

    sources = [examples(rows, "train") for rows in train]
    held_out = {name: examples(rows, set_key(name)) for name, rows in val.items()}
    report["train"]["held_out"] = 0
    if val_fraction > 0:
        if not any(sources):
            raise DataError(f"No row is left to train on: {list_counts(report['train'])}.")
        sources, held = hold_out(sources, val_fraction, seed, lambda example: prompt_key(example.prompt, example.shown))
        report["train"]["held_out"] = len(held)
        report["train"]["kept"] -= len(held)
        if held:  # a single row is trained on
            held_out[""] = held
            report["val"] = {"rows": len(held), "kept": len(held)}
    train_set = PromptSet.of([example for source in sources for example in source], processor)
    val_sets = {name: PromptSet.of(held, processor) for name, held in held_out.items()}
    seen = set(train_set.keys)
    for name, prompts in val_sets.items():
        counts = report[set_key(name)]
        if not len(prompts):
            raise DataError(f"The validation set {set_key(name)} has no rows left: {list_counts(counts)}.")
        counts["overlap"] = sum(key in seen for key in prompts.keys)
    return PromptCorpus(train_set, tuple(map(len, sources)), val_sets, report)


def set_key(name: str) -> str:
    """Return the name of a validation set in a report."""
    return f"val/{name}" if name else "val"


def list_counts(counts: Mapping[str, int]) -> str:
    """Return counts in one line for a message, without filters that removed no row."""
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count or name in ("rows", "kept"))


DROPPED = ("empty", "equal", "promptless")
"""Counts of rows that hold nothing to learn from; `max_dropped` bounds their share."""


def read_examples(
    rows: Rows,
    encoder: Encoder,
    kind: Kind,
    options: ExampleOptions,
) -> tuple[list[Example], Counter[str], str]:
    """Return every row that passes the filters, the number of rows that each filter took, and the name of the format.

    A row is one example. A pair that serves verdicts gives two, the chosen one first; of a pair that serves texts only
    the chosen side is taken.

    The counts are of rows: `rows` (met), `bad` (cannot be read), `empty` (a prompt, a text or one side of a pair says
    nothing), `equal` (both sides say the same, also once cut), `promptless` (an implicit prompt, and nothing in
    common), `overlong` (left out, also where a cut leaves nothing to learn), `truncated` (kept, cut), `kept`; and
    `longest` (tokens of the longest text met, before any cut).
    `rows = bad + empty + equal + promptless + overlong + kept`.

    Raises:
        DataError: a bad row where `on_bad_row` is `error`; where it is `skip`, the first of them if all are bad; rows
            of several formats, or margins in some rows only; an overlong row where `overlong` is `error`; more than
            `max_dropped` of the rows dropped; `rename` of a column that no row has.
        ConfigError: an option that this kind has no use for, or that the chat template does not allow.
    """
    options.check_kind(kind)
    reader = ExampleReader(encoder, kind, options, rows.folder)
    kept, counts = read_more_examples(rows, reader, {})
    if reader.rows.mixed:
        reader = ExampleReader(encoder, kind, options, rows.folder, chat=True)
        kept, counts = read_more_examples(rows, reader, {})
    return kept, counts, next(iter(reader.formats), "")


def read_more_examples(rows: Rows, reader: ExampleReader, met: Mapping[str, int]) -> tuple[list[Example], Counter[str]]:
    """Read the next rows of a source that is read bit by bit, as `read_examples` does.

    Checks that need all rows together are made on all rows met up to here.

    Args:
        rows: The next rows.
        reader: Reader of all rows of the source.
        met: The counts of the rows before.

    Returns:
        The examples, and the counts with those before.
    """
    options, known = reader.options, bool(reader.formats)
    counts = Counter(rows=len(rows) + rows.skipped, bad=rows.skipped)
    counts.update(dict.fromkeys((*DROPPED, "overlong", "truncated", "kept", "longest"), 0))
    kept: list[Example] = []
    first_error = None
    for i in delayed_progress(range(len(rows)), "tokenising", "row"):
        where = rows.where(i)
        try:
            record = reader.record(rows[i], where)
            fate = reason_to_drop(record)
            texts = () if fate else reader.texts(record, where)
        except DataError as error:
            if options.on_bad_row == "error":
                raise
            counts["bad"] += 1
            first_error = first_error or error
            continue
        if not fate:
            counts["longest"] = max(counts["longest"], *map(len, texts))
            fate, examples = reader.examples(record, texts, where)
            kept += examples
        counts.update(fate.split())
    if first_error and not known and counts["bad"] - rows.skipped == len(rows):
        raise first_error
    if len(rows) and not reader.rows.mixed:
        reader.check_whole()
    counts = add_counts(met, counts)
    dropped = sum(counts[reason] for reason in DROPPED)
    if dropped > options.max_dropped * counts["rows"]:
        raise DataError(
            f"{rows.name}: {dropped} of {counts['rows']} rows hold nothing to learn from, more than data.max_dropped="
            f"{options.max_dropped}: {list_counts(counts)}. Look at the columns, or raise data.max_dropped."
        )
    return kept, counts


def add_counts(one: Mapping[str, int], other: Mapping[str, int]) -> Counter[str]:
    """Return the counts of both together: sums, but for `longest` the maximum."""
    names = {**one, **other}
    return Counter(
        {
            name: (max if name.startswith("longest") else operator.add)(one.get(name, 0), other.get(name, 0))
            for name in names
        }
    )


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
    found = [_read_and_count(rows, encoder, kind, options, report, "train") for rows in train]
    sources, formats = [examples for examples, _ in found], [name for _, name in found]
    held_out = {
        name: _read_and_count(rows, encoder, kind, options, report, set_key(name))[0] for name, rows in val.items()
    }
    report["train"]["held_out"] = 0
    if not any(sources):
        raise DataError(f"No row is left to train on: {list_counts(report['train'])}.")
    if val_fraction > 0:
        sources, held = hold_out(sources, val_fraction, seed, example_key)
        report["train"]["held_out"] = len(held)
        report["train"]["kept"] = sum(map(len, sources))
        if held:  # a single row is trained on
            held_out[""] = held
            report["val"] = {"rows": len(held), "kept": len(held)}
    train_set, sizes = training_set(sources, kind, pad_id(encoder.tokenizer), options, encoder.processor)
    return _example_corpus(train_set, sizes, held_out, report, tuple(formats), options)


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
        name: _read_and_count(rows, encoder, train.kind, options, report, set_key(name))[0]
        for name, rows in val.items()
    }
    return _example_corpus(train, sizes, held_out, report, formats, options)


def training_set(
    sources: Sequence[Sequence[Example]],
    kind: Kind,
    pad: int,
    options: ExampleOptions,
    processor: Processor | None = None,
) -> tuple[ExampleSet, tuple[int, ...]]:
    """Return the rows of all sources, each packed by itself where rows are packed, and the size of each."""
    parts = [_example_set(examples, kind, pad, options, processor) for examples in sources]
    first = parts[0]
    whole = [example for part in parts for example in part.examples]
    packs = None if first.packs is None else [pack for part in parts for pack in part.packs or ()]
    return ExampleSet(kind, whole, pad, packs, first.processor), tuple(map(len, parts))


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that batches are padded with."""
    assert isinstance(tokenizer.pad_token_id, int)
    return tokenizer.pad_token_id


def _example_corpus(
    train_set: ExampleSet,
    sizes: tuple[int, ...],
    held_out: Mapping[str, Sequence[Example]],
    report: Report,
    formats: tuple[str, ...],
    options: ExampleOptions,
) -> ExampleCorpus:
    settings = train_set.kind, train_set.pad_id, options, train_set.processor
    sets = {name: _example_set(rows, *settings) for name, rows in held_out.items()}
    seen = {example_key(example) for example in train_set.examples}
    for name, examples in sets.items():
        counts = report[set_key(name)]
        if not len(examples):
            raise DataError(f"The validation set {set_key(name)} has no rows left: {list_counts(counts)}.")
        counts["overlap"] = sum(example_key(example) in seen for example in examples.examples)
    if options.packing != "none":
        for key, examples in {"train": train_set, **{set_key(name): s for name, s in sets.items()}}.items():
            report[key]["packed_rows"] = len(examples)
    return ExampleCorpus(train_set, sizes, sets, report, formats)


def _example_set(
    examples: Sequence[Example], kind: Kind, pad: int, options: ExampleOptions, processor: Processor | None
) -> ExampleSet:
    if options.packing == "none":
        return ExampleSet(kind, examples, pad, processor=processor)
    if seeing := next((example for example in examples if example.shown), None):
        raise ConfigError(
            f"{seeing.where}: the row has images, and data.packing={options.packing} packs text only. Set "
            "data.packing=none."
        )
    assert options.max_length is not None
    return ExampleSet(kind, examples, pad, pack_examples(examples, options.max_length, options.packing))


def _read_and_count(
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


def example_key(example: Example) -> str:
    """Return a key that is equal for rows of equal prompts; a text without a prompt is its own."""
    return json.dumps(example.texts[0].ids) if example.prompt is None else prompt_key(example.prompt, example.shown)
