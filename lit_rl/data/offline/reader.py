"""Reads the rows of a source one at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_rl.data.image_prompts import EqualVideos, Shown
from lit_rl.data.offline.conversations import Text, is_blank
from lit_rl.data.offline.encode import Encoder
from lit_rl.data.offline.example import Encoded, Example, Kind
from lit_rl.data.offline.formats import Record, read_record
from lit_rl.data.offline.options import ExampleOptions
from lit_rl.data.offline.truncation import cut, cut_labels, windows
from lit_rl.data.row_reader import RowReader
from lit_rl.data.templates import OF_ROWS
from lit_rl.errors import ConfigError, DataError

COMPLETIONS = ("completion", "chosen", "rejected", "completions")
"""Columns that show no images: what is answered is text."""


class Reader:
    """A reader of rows one at a time, which remembers what only all rows together can prove wrong."""

    def __init__(
        self,
        encoder: Encoder,
        kind: Kind,
        options: ExampleOptions,
        folder: Path | None = None,
        chat: bool = False,
    ) -> None:
        self.kind: Kind = kind
        self.encoder = encoder
        processor = encoder.processor
        self.options, self.processor = options, processor
        self.rows = RowReader(options, processor is not None, folder, chat)
        self.vocabulary = len(encoder.tokenizer)
        self.videos = EqualVideos(processor)
        self.formats: dict[str, str] = {}
        self.margins: dict[bool, str] = {}

    def record(self, row: dict[str, Any], where: str) -> Record:
        """Return the row after `map_row` and `rename`, recognised and checked."""
        options = self.options
        row, images = self.rows.read(row, where, "prompt", "messages", without=COMPLETIONS)
        record = read_record(row, where, self.kind, system_prompt=options.system_prompt, learn=options.learn)
        self.rows.note_system(record.prompt, options.system_prompt, where)
        record = replace(record, images=images) if images else record
        if self.kind == "texts" and record.format.startswith("preference ("):
            return replace(record, completions=record.completions[:1])
        return record

    def texts(self, record: Record, where: str) -> tuple[Encoded, ...]:
        """Return the tokens of a record that has something to learn from, not cut yet."""
        self.formats.setdefault(record.format, where)
        self.margins.setdefault(record.margin is not None, where)
        if record.template_kwargs and not record.conversational:
            self.rows.note(f"the column {OF_ROWS} does nothing: no chat template renders the row", where)
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
        if self.kind != "texts" and len(parts) == 2:
            assert prompt is not None
            return encoder.pair(prompt, parts, where, tools=tools, images=record.images)
        whole = record.format.startswith("language")
        if whole and self.options.learn == "completion" and not _closed(parts[0]):
            raise DataError(
                f"{where}: the last of the messages is not the assistant's, and data.learn=completion learns that one: "
                "set data.learn to assistant or all, or leave such rows out with data.on_bad_row=skip."
            )
        images = record.images
        return (encoder.encode(prompt, parts[0], where, tools=tools, every_turn=whole, images=images),)

    def examples(self, record: Record, texts: tuple[Encoded, ...], where: str) -> tuple[str, list[Example]]:
        """Return the fate of a row, as its counts name it, and its examples."""
        options = self.options
        labels = tuple(map(float, record.labels))
        if options.last_step_only and self.kind == "stepwise":
            texts, labels = (_last_learned(texts[0]),), labels[-1:]
        kept = windows(texts, options.text_limit, options.max_completion_tokens, options.keep)
        whole = all(len(window) == len(text) for window, text in zip(kept, texts))
        if not whole and options.overlong == "error":
            raise DataError(self._too_long(texts, where))
        if not whole and options.overlong == "drop":
            return "overlong", []
        if record.images and any(w.start or w.stop < text.prompt_tokens for w, text in zip(kept, texts)):
            raise DataError(f"{self._too_long(texts, where)} A cut would go through its images.")
        short = tuple(cut(text, window) for text, window in zip(texts, kept))
        if not all(any(text.learned) for text in short):
            return "empty" if whole else "overlong", []
        if len(short) == 2 and short[0].ids == short[1].ids:
            return "equal", []
        prompt = record.prompt if short[0].prompt_tokens and not is_blank(record.prompt or "") else None
        if self.kind == "stepwise":
            labels = cut_labels(texts[0], labels, kept[0])
        self.videos.add(record.images, where)
        rendered = texts[0].shown
        shown = None if rendered is None else Shown(rendered, record.images, where)
        common = Example(short, where, prompt, record.columns, record.margin, record.desirable, shown, labels)
        examples = [common]
        if self.kind == "verdicts" and len(short) == 2:
            examples = [replace(common, texts=(text,), desirable=good) for text, good in zip(short, (True, False))]
        return "kept" if whole else "kept truncated", examples

    def check_whole(self) -> None:
        self.encoder.left_out.say()
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
        self.rows.check_renamed()
        self.rows.say()

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


def nothing_in(record: Record) -> str:
    """Return the reason why a record has nothing to learn from, as the counts name it; an empty string where it has."""
    if record.tokens is not None:
        return "" if any(record.tokens[1][1:]) else "empty"
    sides, steps = record.completions, record.format.startswith("stepwise")
    if not sides or (all if steps else any)(map(is_blank, sides)):
        return "empty"
    if record.format.startswith("preference") and len(sides) == 2 and sides[0] == sides[1]:
        return "equal"
    if record.format.startswith("language") or not is_blank(record.prompt or ""):
        return ""
    return "promptless" if "implicit" in record.format else "empty"


def _closed(text: Text) -> bool:
    return isinstance(text, str) or text[-1]["role"] == "assistant"


def _last_learned(text: Encoded) -> Encoded:
    last = max(i for i, flag in enumerate(text.learned) if flag)
    return replace(text, learned=[i == last for i in range(len(text))])
