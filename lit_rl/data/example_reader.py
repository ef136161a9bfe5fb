"""Rows become examples that are learned from as they are, and examples of all sources one set, packed or not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, DataError
from lit_rl.data.encode import (
    Encoder,
    Keep,
    Learn,
    Overlong,
    Packing,
    kept_windows,
    pack_examples,
    truncate,
    truncate_labels,
)
from lit_rl.data.example_formats import ExampleRecord, read_record
from lit_rl.data.example_set import Encoded, Example, ExampleSet
from lit_rl.data.kinds import Kind
from lit_rl.data.message_forms import normalize_messages
from lit_rl.data.rendering import KWARGS_COLUMN
from lit_rl.data.rows import is_blank
from lit_rl.data.set_reader import RowOptions, SetReader, list_counts, read_source
from lit_rl.data.sources import Rows
from lit_rl.data.splits import prompt_key
from lit_rl.ops.ranges import AtLeastOne, AtLeastTwo, Portion


@checked("data")
@dataclass(frozen=True, kw_only=True)
class ExampleOptions(RowOptions):
    """Settings by which a row becomes an example; the fields are those of the data modules.

    Args:
        max_length: Longest text, prompt and completion together, in tokens, at least 2; None is no limit.
        max_completion_tokens: Longest completion (a text without a prompt is one), in tokens, at least 1; None is no
            limit of its own.
        keep: The end of a too long text that stays; see `kept_windows`.
        overlong: Action for a row over either limit: `truncate` cuts it in token space, and drops it where nothing
            learned is left; `drop` leaves the row out and counts it; `error` refuses it.
        max_dropped: Share of the rows that may be dropped as empty, equal or without a common prompt, in [0, 1].
        learn: Texts: which tokens are learned; see `Encoder`. Of a row of `messages`, `completion` is the last message,
            and `assistant` all that the assistant says. Of other rows both learn nothing of the prompt.
        packing: Texts: how they are put together into rows of `max_length`; with `wrapped` no text is cut for being
            long.
        separator: Labelled steps: what ends each.
        last_step_only: Labelled steps: learn the last label only.
    """

    max_length: AtLeastTwo | None = 1024
    max_completion_tokens: AtLeastOne | None = None
    keep: Keep = "start"
    overlong: Overlong = "truncate"
    max_dropped: Portion = 0.1
    learn: Learn = "completion"
    packing: Packing = "none"
    separator: str = "\n"
    last_step_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep != "start" and self.overlong != "truncate":
            raise ConfigError(
                f"data.keep={self.keep} says what is left of a text that is cut, and data.overlong={self.overlong} "
                "cuts none: leave data.keep at start, or set data.overlong to truncate."
            )
        if self.packing != "none" and self.max_length is None:
            raise ConfigError(f"data.packing={self.packing} needs data.max_length, the tokens of a row, which is null.")

    @property
    def text_limit(self) -> int | None:
        """The longest text."""
        return None if self.packing == "wrapped" else self.max_length

    def check_kind(self, kind: Kind) -> None:
        """Refuse options that do nothing for this kind of examples.

        Raises:
            ConfigError: an option that would do nothing for this kind.
        """
        for key, value, neutral, owner in (
            ("learn", self.learn, "completion", "texts"),
            ("packing", self.packing, "none", "texts"),
            ("last_step_only", self.last_step_only, False, "stepwise"),
        ):
            if value != neutral and kind != owner:
                raise ConfigError(
                    f"data.{key}={value} is for methods that learn from {owner}, and this one learns from {kind}: "
                    f"leave it at {neutral}."
                )


COMPLETIONS = ("completion", "chosen", "rejected", "completions")
"""Columns that show no images: what is answered is text."""


class ExampleReader(SetReader[Example, tuple[ExampleRecord, tuple[Encoded, ...]]]):
    """A reader of rows that are learned from; see `SetReader`.

    A row is one example. A pair that serves verdicts gives two, the chosen one first; of a pair that serves texts only
    the chosen side is taken. Rows that hold nothing are `empty` (a prompt, a text or one side of a pair says nothing),
    `equal` (both sides say the same, also once cut) or `promptless` (an implicit prompt, and nothing in common);
    `overlong` are also those of which a cut leaves nothing to learn.

    Args:
        kind: Kind of the examples.
    """

    label = "tokenising"
    filters = ("empty", "equal", "promptless")

    def __init__(
        self, encoder: Encoder, kind: Kind, options: ExampleOptions, folder: Path | None = None, chat: bool = False
    ) -> None:
        super().__init__(encoder, options, folder, chat)
        self.kind: Kind = kind
        self.options = options
        self.vocabulary = len(encoder.tokenizer)
        self.formats: dict[str, str] = {}
        self.margins: dict[bool, str] = {}

    @property
    def format(self) -> str:
        """The detected format of the source; empty where no row that holds something was met yet."""
        return next(iter(self.formats), "")

    def read(self, rows: Rows, met: Mapping[str, int] | None = None) -> tuple[list[Example], Counter[str]]:
        """Read the next rows as `SetReader.read` does.

        Raises:
            DataError: also more than `max_dropped` of all rows met hold nothing.
        """
        kept, counts = super().read(rows, met)
        dropped = sum(counts[reason] for reason in self.filters)
        if dropped > self.options.max_dropped * counts["rows"]:
            raise DataError(
                f"{rows.name}: {dropped} of {counts['rows']} rows hold nothing to learn from, more than "
                f"data.max_dropped={self.options.max_dropped}: {list_counts(counts)}. Look at the columns, or raise "
                "data.max_dropped."
            )
        return kept, counts

    def encode(self, row: dict[str, Any], where: str) -> tuple[str, tuple[ExampleRecord, tuple[Encoded, ...]], int]:
        record = self.record(row, where)
        fate = reason_to_drop(record, self.options.learn)
        texts = () if fate else self.texts(record, where)
        return fate, (record, texts), max(map(len, texts), default=0)

    def record(self, row: dict[str, Any], where: str) -> ExampleRecord:
        """Return the row after `map_row` and `rename`, recognised and checked."""
        options = self.options
        row, images = self.take(row, where, "prompt", "messages", without=COMPLETIONS)
        if self.kind == "triples":  # elsewhere the column may hold anything, for a reward
            row, notes = normalize_messages(row, where, "reference")
            for note in notes:
                self.note(note, where)
        record = read_record(row, where, self.kind, system_prompt=options.system_prompt, learn=options.learn)
        self.note_system(record.prompt, where)
        record = replace(record, images=images) if images else record
        if self.kind == "texts" and record.format.startswith("preference ("):
            return replace(record, completions=record.completions[:1])
        return record

    def texts(self, record: ExampleRecord, where: str) -> tuple[Encoded, ...]:
        """Return the tokens of a record that has something to learn from, not cut yet."""
        self.formats.setdefault(record.format, where)
        self.margins.setdefault(record.margin is not None, where)
        if record.template_kwargs and not record.conversational:
            self.note(f"the column {KWARGS_COLUMN} does nothing: no chat template renders the row", where)
        if record.tokens is not None:
            return (self._tokenised(record.tokens[0], record.tokens[1], where),)
        self.videos.check(record.images, where)
        prompt, parts, tools = record.prompt, record.completions, record.tools
        encoder = self.encoder.with_kwargs(record.template_kwargs)
        if self.kind == "stepwise":
            assert prompt is not None
            if record.images:
                raise ConfigError(f"{where}: the row has images, and labelled steps are learned from text alone.")
            steps = [str(step) for step in parts]
            return (encoder.steps(prompt, steps, self.options.separator, where, tools=tools),)
        if self.kind != "texts" and (len(parts) == 2 or self.kind == "triples"):
            assert prompt is not None
            return encoder.pair(prompt, parts, where, tools=tools, images=record.images)
        whole = record.format.startswith("language")
        if (
            whole
            and self.options.learn == "completion"
            and not (isinstance(parts[0], str) or parts[0][-1]["role"] == "assistant")
        ):
            raise DataError(
                f"{where}: the last of the messages is not the assistant's, and data.learn=completion learns that one: "
                "set data.learn to assistant or all, or leave such rows out with data.on_bad_row=skip."
            )
        how: dict[str, Any] = {"tools": tools, "every_turn": whole and self.options.learn != "completion"}
        return tuple(encoder.rows(prompt, parts[0], where, images=record.images, **how))

    def keep(self, found: tuple[ExampleRecord, tuple[Encoded, ...]], where: str) -> tuple[str, list[Example]]:
        (record, texts), options = found, self.options
        labels = tuple(map(float, record.labels))
        if options.last_step_only and self.kind == "stepwise":
            last = max(i for i, flag in enumerate(texts[0].learned) if flag)
            texts = (replace(texts[0], learned=[i == last for i in range(len(texts[0]))]),)
            labels = labels[-1:]
        if self.kind == "texts" and len(texts) != 1:
            return self._keep_rows(record, texts, where)
        kept = kept_windows(texts, options.text_limit, options.max_completion_tokens, options.keep)
        whole = all(len(window) == len(text) for window, text in zip(kept, texts))
        if not whole and options.overlong == "error":
            raise DataError(self._too_long(texts, where))
        if not whole and options.overlong == "drop":
            return "overlong", []
        if texts[0].shown and any(w.start or w.stop < text.prompt_tokens for w, text in zip(kept, texts)):
            raise DataError(f"{self._too_long(texts, where)} A cut would go through its images.")
        short = tuple(truncate(text, window) for text, window in zip(texts, kept))
        if not all(any(text.learned) for text in short):
            return "empty" if whole else "overlong", []
        pair = short[:2]
        if len(pair) == 2 and pair[0].ids == pair[1].ids:
            return "equal", []
        prompt = record.prompt if short[0].prompt_tokens and not is_blank(record.prompt or "") else None
        if self.kind == "stepwise":
            labels = truncate_labels(texts[0], labels, kept[0])
        self.videos.add(record.images, where)
        common = Example(short, where, prompt, record.columns, record.margin, record.desirable, texts[0].shown, labels)
        examples = [common]
        if self.kind == "verdicts" and len(short) == 2:
            examples = [replace(common, texts=(text,), desirable=good) for text, good in zip(short, (True, False))]
        return "kept" if whole else "kept truncated", examples

    def _keep_rows(self, record: ExampleRecord, texts: Sequence[Encoded], where: str) -> tuple[str, list[Example]]:
        """Return the fate of a conversation that became several rows, or none, and the example of each row that is
        left."""
        place = len(texts) - 1 if record.format.startswith("language") else 0  # of the row behind the record's prompt
        key = prompt_key(record.prompt) if record.prompt else json.dumps([text.ids for text in texts])
        fates, examples = dict[str, None](), list[Example]()
        for number, text in enumerate(texts):
            own = record if number == place else replace(record, prompt=None)
            fate, found = self.keep((own, (text,)), where)
            fates.update(dict.fromkeys(fate.split()))
            examples += [replace(example, conversation=key) for example in found]
        if not examples:
            return next(iter(fates), "empty"), []
        return f"kept forked{' truncated' if {'truncated', 'overlong'} & fates.keys() else ''}", examples

    def check_alike(self) -> None:
        if len(self.formats) > 1:
            (one, here), (other, there), *_ = self.formats.items()
            raise DataError(
                f"Rows of several formats: {here} is {one}, {there} is {other}. Make all rows of a source one format, "
                "for example with data.map_row, or give them as data.sources of their own."
            )
        if len(self.margins) > 1:
            raise DataError(
                f"Column 'margin': {self.margins[True]} has a number, {self.margins[False]} has none. Give every row "
                "one, or none with data.map_row."
            )

    def _tokenised(self, ids: list[int], learned: list[bool], where: str) -> Encoded:
        if max(ids) >= self.vocabulary:
            raise DataError(
                f"{where}: input_ids holds {max(ids)}, and the tokenizer has {self.vocabulary} tokens: the row was "
                "made with another tokenizer. Take the model of that one, or give the text."
            )
        never = () if self.processor is None else self.processor.placeholders  # never learned
        learned = [flag and token not in never for flag, token in zip(learned, ids)]
        first = learned.index(True) if any(learned) else len(ids)
        return Encoded(ids, [i > 0 and flag for i, flag in enumerate(learned)], first)

    def _too_long(self, texts: tuple[Encoded, ...], where: str) -> str:
        longest = max(texts, key=len)
        completion = max(len(text) - text.prompt_tokens for text in texts)
        limits = f"data.max_length={self.options.text_limit}"
        if self.options.max_completion_tokens is not None:
            limits += f" and data.max_completion_tokens={self.options.max_completion_tokens}"
        return (
            f"{where}: the text has {len(longest)} tokens, its completion up to {completion}; {limits}. Raise them, or "
            "set data.overlong to truncate or drop."
        )


def reason_to_drop(record: ExampleRecord, learn: Learn) -> str:
    """Return the reason why a record has nothing to learn from, as the counts name it; an empty string where it has."""
    if record.tokens is not None:
        return "" if any(record.tokens[1][1:]) else "empty"
    sides, steps = record.completions, record.format.startswith("stepwise")
    if learn == "assistant" and record.format.startswith("language") and sides and isinstance(sides[0], list):
        before = record.prompt if isinstance(record.prompt, list) else []
        sides = ([message for message in (*before, *sides[0]) if message["role"] == "assistant"],)
    if not sides or (all if steps else any)(map(is_blank, sides)):
        return "empty"
    if "preference" in record.format and len(sides) > 1 and sides[0] == sides[1]:
        return "equal"
    if record.format.startswith("language") or not is_blank(record.prompt or ""):
        return ""
    return "promptless" if "implicit" in record.format else "empty"


def read_examples(
    rows: Rows, encoder: Encoder, kind: Kind, options: ExampleOptions
) -> tuple[list[Example], Counter[str], str]:
    """Return every row that passes the filters, the counts of `ExampleReader`, and the name of the format.

    `rows = bad + empty + equal + promptless + overlong + kept`.

    Raises:
        DataError: as `ExampleReader.read`; rows of several formats, or margins in some rows only; an overlong row where
            `overlong` is `error`.
        ConfigError: an option that this kind has no use for, or that the chat template does not allow.
    """
    options.check_kind(kind)
    kept, counts, reader = read_source(rows, lambda chat: ExampleReader(encoder, kind, options, rows.folder, chat))
    return kept, counts, reader.format


def example_set(
    sources: Sequence[Sequence[Example]], encoder: Encoder, kind: Kind, options: ExampleOptions
) -> tuple[ExampleSet, tuple[int, ...]]:
    """Return the rows of all sources, each packed by itself where rows are packed, and the size of each.

    Raises:
        ConfigError: rows that are packed have images.
        DataError: videos cannot be read together.
    """
    pad: Any = encoder.tokenizer.pad_token_id
    whole = [example for examples in sources for example in examples]
    if options.packing == "none":
        return ExampleSet(kind, whole, pad, processor=encoder.processor), tuple(map(len, sources))
    if seeing := next((example for example in whole if example.shown), None):
        raise ConfigError(
            f"{seeing.where}: the row has images, and data.packing={options.packing} packs text only. Set "
            "data.packing=none."
        )
    assert options.max_length is not None
    packs = [pack_examples(examples, options.max_length, options.packing) for examples in sources]
    return ExampleSet(kind, whole, pad, [row for rows in packs for row in rows]), tuple(map(len, packs))
