"""All sets of a run: training rows by source, validation sets by name, and what every filter took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_rl.data.image_prompts import Processor
from lit_rl.data.left_out import LeftOut
from lit_rl.data.prompt_set import Example, PromptOptions, PromptSet, read_examples
from lit_rl.data.sources import Rows
from lit_rl.data.splits import count_overlap, hold_out, prompt_key
from lit_rl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Report = dict[str, dict[str, int]]
"""Counts by set: `train`, and `val` or `val/<name>`."""


@dataclass(frozen=True)
class Corpus:
    """The training and validation prompts that a data module serves."""

    train: PromptSet
    sizes: tuple[int, ...]
    """Training rows of each source; `train` has the sources one after another."""
    val: Mapping[str, PromptSet]
    report: Report


def read_corpus(
    train: Sequence[Rows],
    val: Mapping[str, Rows],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    *,
    processor: Processor | None = None,
    val_fraction: float = 0.0,
    seed: int = 0,
) -> Corpus:
    """Format, tokenise, filter and count every set, and hold out a share of the training prompts as an unnamed `val`.

    The report has the counts of `read_examples`; for `train` also `held_out`, which `kept` leaves out; for validation
    sets also `overlap`, the rows whose prompt a training row has.

    Raises:
        DataError: a row or a whole set cannot be used; a validation set has no rows left.
    """
    report: Report = {}
    left_out = LeftOut(tokenizer, options.chat_template_kwargs)

    def examples(rows: Rows, key: str) -> list[Example]:
        found, counts = read_examples(rows, tokenizer, options, processor, left_out)
        _add(counts, report.setdefault(key, {}))
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
    for name, prompts in val_sets.items():
        counts = report[set_key(name)]
        if not len(prompts):
            raise DataError(f"The validation set {set_key(name)} has no rows left: {list_counts(counts)}.")
        counts["overlap"] = count_overlap(train_set.keys, prompts.keys)
    return Corpus(train_set, tuple(map(len, sources)), val_sets, report)


def set_key(name: str) -> str:
    """Return the name of a validation set in a report."""
    return f"val/{name}" if name else "val"


def list_counts(counts: Mapping[str, int]) -> str:
    """Return counts in one line for a message, without filters that removed no row."""
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count or name in ("rows", "kept"))


def _add(counts: Mapping[str, int], total: dict[str, int]) -> None:
    for name, count in counts.items():
        before = total.get(name, 0)
        total[name] = max(before, count) if name == "longest" else before + count
