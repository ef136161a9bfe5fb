"""Rows of one set, formatted, tokenised once and counted."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_rl.core.episode import Prompt
from lit_rl.core.errors import ConfigError, DataError, in_range, one_of
from lit_rl.core.progress_bar import delayed_progress
from lit_rl.core.rollout import PromptBatch
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.data.message_forms import read_tools
from lit_rl.data.readers import ON_BAD_ROW, OnBadRow
from lit_rl.data.rendering import (
    KWARGS_COLUMN,
    TemplateOmissions,
    check_template_kwargs,
    control_tokens,
    encode_prompt,
    render_prompt,
    row_template_kwargs,
)
from lit_rl.data.row_visuals import MAX_IMAGE_PIXELS, MOST_IMAGE_PIXELS
from lit_rl.data.rows import RowFunction, RowReader, add_system_prompt, is_empty, split_prompt
from lit_rl.data.sources import Rows
from lit_rl.data.splits import prompt_key
from lit_rl.data.visual_prompts import EqualVideos, Processor, PromptVisuals, refuse_reserved, refuse_unequal_videos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["drop", "truncate_left", "error"]
OVERLONG = ("drop", "truncate_left", "error")


@dataclass(frozen=True)
class PromptOptions:
    """Settings by which a row becomes a prompt; the fields are those of `RolloutDataModule`."""

    prompt_key: str = "prompt"
    rename: Mapping[str, str] = field(default_factory=dict)
    map_row: RowFunction | None = None
    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int = 512
    overlong: Overlong = "drop"
    on_bad_row: OnBadRow = "error"
    max_image_pixels: int = MAX_IMAGE_PIXELS

    def __post_init__(self) -> None:
        in_range("data.max_prompt_tokens", self.max_prompt_tokens, low=1)
        in_range("data.max_image_pixels", self.max_image_pixels, low=1, high=MOST_IMAGE_PIXELS)
        one_of("data.overlong", self.overlong, OVERLONG)
        one_of("data.on_bad_row", self.on_bad_row, ON_BAD_ROW)
        check_template_kwargs(self.chat_template_kwargs)


@dataclass(frozen=True)
class PromptExample:
    """One row that passed every filter."""

    prompt: Prompt
    prompt_ids: list[int]
    columns: dict[str, Any]
    where: str
    shown: PromptVisuals | None = None
    """None: a prompt without images."""


@dataclass(frozen=True)
class PromptSet:
    """The rows that are left, by column. A row's index here is its name for the rest of the run."""

    prompts: Sequence[Prompt]
    prompt_ids: Sequence[list[int]]
    columns: Mapping[str, Sequence[Any]]
    shown: Sequence[PromptVisuals | None] = ()
    """The visuals of each prompt; empty where no prompt has any."""
    processor: Processor | None = None
    """Makes pixels of it."""

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def of(cls, examples: Sequence[PromptExample], processor: Processor | None = None) -> PromptSet:
        """Build a set of the examples, in their order; a column that a row lacks is None there.

        Raises:
            DataError: a column mixes kinds of values that no lossless change makes one, or videos cannot be read
                together.
        """
        names = dict.fromkeys(name for example in examples for name in example.columns)
        shown = [example.shown for example in examples]
        refuse_unequal_videos(processor, shown)
        return cls(
            prompts=[example.prompt for example in examples],
            prompt_ids=[example.prompt_ids for example in examples],
            columns={name: _column(name, examples) for name in names},
            shown=shown if any(shown) else (),
            processor=processor,
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for equal prompts, token ids and columns in the same order."""
        digest = hashlib.blake2b(digest_size=16)
        for i, prompt in enumerate(self.prompts):
            row: list[Any] = [prompt, self.prompt_ids[i], {name: values[i] for name, values in self.columns.items()}]
            if self.shown and self.processor:
                shown = self.shown[i]
                row += [self.processor.name, list(map(str, shown.visuals)) if shown else []]
                row += shown.maker_of_videos(self.processor) if shown else []
            digest.update(json.dumps(row, sort_keys=True, skipkeys=True, default=_plain).encode())
        return digest.hexdigest()

    @functools.cached_property
    def keys(self) -> list[str]:
        """A text for each row, equal for rows of equal prompts and images."""
        return [prompt_key(prompt, self.shown[i] if self.shown else None) for i, prompt in enumerate(self.prompts)]

    def vision(self, row: int) -> PromptVision | None:
        """Return the vision inputs of a prompt: made again, and equal to the bit, each time.

        Raises:
            DataError: an image is gone, or has changed since the data were read.
        """
        shown = self.shown[row] if self.shown else None
        return shown.vision(self.processor, row) if shown and self.processor else None

    def first_shown(self) -> tuple[list[int], PromptVision | None] | None:
        """Return tokens and vision inputs of the first prompt that shows images; None where none does."""
        row = next((row for row, shown in enumerate(self.shown) if shown), None)
        return None if row is None else (self.prompt_ids[row], self.vision(row))

    def visions(self, rows: Sequence[int]) -> list[PromptVision | None]:
        """Return `vision` of each of the rows."""
        return [self.vision(row) for row in rows]

    def batch(
        self, rows: Sequence[int], *, occurrences: Sequence[int] | None = None, rollout: int = 0, slot: int = 0
    ) -> PromptBatch:
        """Return the given rows as a batch; without `occurrences` no row stood earlier."""
        return PromptBatch(
            prompts=[self.prompts[i] for i in rows],
            prompt_ids=[self.prompt_ids[i] for i in rows],
            columns={name: [values[i] for i in rows] for name, values in self.columns.items()},
            rows=list(rows),
            occurrences=[0] * len(rows) if occurrences is None else list(occurrences),
            rollout=rollout,
            slot=slot,
            vision=self.visions if self.shown else None,
        )


def read_prompts(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    processor: Processor | None = None,
    left_out: TemplateOmissions | None = None,
    chat: bool = False,
) -> tuple[list[PromptExample], Counter[str]]:
    """Return every row that passes the filters, and the number that each filter took. With `chat` plain texts are read
    as messages; where one of them comes with images, the set is read again that way.

    The counts are `rows` (met), `bad`, `empty`, `overlong` (left out), `truncated` (kept, cut), `kept`, `longest`
    (tokens of the longest prompt met, before any cut); `rows = bad + empty + overlong + kept`.

    Raises:
        DataError: a bad row where `on_bad_row` is `error`; where it is `skip`, the first of them if all are bad; texts
            and messages mixed; an overlong prompt where `overlong` is `error`; `rename` of a column that no row has.
    """
    counts = Counter(
        rows=len(rows) + rows.skipped, bad=rows.skipped, empty=0, overlong=0, truncated=0, kept=0, longest=0
    )
    left_out = left_out or TemplateOmissions(tokenizer, options.chat_template_kwargs)
    reader = _PromptReader(tokenizer, options, processor, rows.folder, left_out, chat)
    kept, first_error = [], None
    for i in delayed_progress(range(len(rows)), "tokenising prompts", "row"):
        try:
            example = reader.example(rows[i], rows.where(i))
        except DataError as error:
            if options.on_bad_row == "error":
                raise
            counts["bad"] += 1
            first_error = first_error or error
            continue
        if example is None:
            counts["empty"] += 1
            continue
        counts["longest"] = max(counts["longest"], len(example.prompt_ids))
        if len(example.prompt_ids) <= options.max_prompt_tokens:
            if example.shown is not None:
                reader.videos.add(example.shown.visuals, example.where)
            kept.append(example)
        elif options.overlong == "truncate_left" and example.shown:
            raise ConfigError(
                f"{example.where}: the prompt has {len(example.prompt_ids)} tokens with its images, "
                f"data.max_prompt_tokens={options.max_prompt_tokens}, and data.overlong=truncate_left would cut "
                "through an image. Use drop or error, raise the limit, or make images smaller."
            )
        elif options.overlong == "truncate_left":
            counts["truncated"] += 1
            tail = example.prompt_ids[-options.max_prompt_tokens :]
            kept.append(PromptExample(example.prompt, tail, example.columns, example.where))
        elif options.overlong == "drop":
            counts["overlong"] += 1
        else:
            raise DataError(
                f"{example.where}: the prompt has {len(example.prompt_ids)} tokens, "
                f"data.max_prompt_tokens={options.max_prompt_tokens}. Raise it, or set data.overlong to drop or "
                "truncate_left."
            )
    if first_error and counts["bad"] - rows.skipped == len(rows):
        raise first_error
    if reader.rows.mixed:
        return read_prompts(rows, tokenizer, options, processor, left_out, chat=True)
    reader.check_whole()
    counts["kept"] = len(kept)
    return kept, counts


class _PromptReader:
    """A reader of rows one at a time, which remembers what only all rows together can prove wrong."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: PromptOptions,
        processor: Processor | None,
        folder: Path | None,
        left_out: TemplateOmissions,
        chat: bool,
    ) -> None:
        self.tokenizer, self.processor, self.left_out = tokenizer, processor, left_out
        self.options = options
        self.rows = RowReader(options, processor is not None, folder, chat)
        self.control = control_tokens(tokenizer)
        if processor is not None:
            self.control = sorted({*self.control, *processor.reserved})
        self.videos = EqualVideos(processor)
        self.kinds: dict[type, str] = {}

    def example(self, row: dict[str, Any], where: str) -> PromptExample | None:
        """Return the row formatted and tokenised, or None where its prompt is empty."""
        options = self.options
        row, images = self.rows.read(row, where, options.prompt_key)
        prompt, columns = split_prompt(row, where, prompt_key=options.prompt_key)
        self.kinds.setdefault(type(prompt), where)
        if is_empty(prompt):
            return None
        self.rows.note_system(prompt, options.system_prompt, where)
        prompt = add_system_prompt(prompt, options.system_prompt)
        own = row_template_kwargs(columns, where)
        if own and isinstance(prompt, str):
            self.rows.note(
                f"the column {KWARGS_COLUMN} does nothing: the prompt is plain text, without a chat template", where
            )
        columns |= {KWARGS_COLUMN: own or None} if KWARGS_COLUMN in columns else {}
        kwargs = {**options.chat_template_kwargs, **own}
        if tools := self._tools(prompt, columns.get("tools"), where):
            columns["tools"], kwargs = tools, {**kwargs, "tools": tools}
        if images and self.processor is not None and not isinstance(prompt, str):
            text = render_prompt(self.tokenizer, prompt, where, kwargs, self.control, self.left_out)
            self.videos.check(images, where)
            ids, _ = self.processor.process(text, images, where)
            return PromptExample(prompt, ids, columns, where, PromptVisuals(text, images, where))
        if self.processor is not None:
            if isinstance(prompt, str):
                refuse_reserved(self.processor, prompt, where)
            self.processor.refuse_without_images(where)
        ids = encode_prompt(
            self.tokenizer,
            prompt,
            where=where,
            chat_template_kwargs=kwargs,
            control=self.control,
            left_out=self.left_out,
        )
        return PromptExample(prompt, ids, columns, where)

    def _tools(self, prompt: Prompt, column: Any, where: str) -> list[Any] | None:
        """Return the schemas for the chat template; a column of anything else is for rewards alone."""
        if not column:
            return None
        try:
            tools = read_tools(column, where)
        except DataError:
            self.rows.note("the column tools holds no JSON schemas: rewards see it, the chat template does not", where)
            return None
        if isinstance(prompt, str):
            self.rows.note("the column tools is not shown: the prompt is plain text, without a chat template", where)
            return None
        return tools

    def check_whole(self) -> None:
        """Raise DataError for prompts of two kinds; log what was noted."""
        self.left_out.warn()
        if len(self.kinds) > 1:
            raise DataError(
                f"Prompts of two kinds: {self.kinds[str]} is a string, {self.kinds[list]} a list of messages. "
                "Make all of them one kind, for example with data.map_row."
            )
        self.rows.check_renamed()
        self.rows.log_notes()


def _column(name: str, examples: Sequence[PromptExample]) -> list[Any]:
    values = [example.columns.get(name) for example in examples]
    kinds: dict[str, str] = {}
    for value, example in zip(values, examples):
        if value is not None:
            kinds.setdefault(_kind(value), example.where)
    if set(kinds) == {"text", "number"}:  # pandas writes NaN for missing values
        values = [None if isinstance(value, float) and value != value else value for value in values]
        return [str(value) if isinstance(value, int | float) else value for value in values]
    if len(kinds) > 1:
        (one, here), (other, there), *_ = kinds.items()
        raise DataError(
            f"Column {name!r} mixes kinds of values: {one} in {here}, {other} in {there}. Make all of them one kind, "
            "for example with data.map_row."
        )
    return values


def _kind(value: Any) -> str:
    names = {str: "text", bool: "boolean", int: "number", float: "number", list: "list", dict: "object"}
    return names.get(type(value), type(value).__name__)


def _plain(value: Any) -> str:
    """Return a value's text for the fingerprint; `str` only where the class defines it, since the default holds an
    address."""
    return f"{type(value).__name__}:{value}" if type(value).__str__ is not object.__str__ else type(value).__name__
