"""Prompts to be answered, tokenised once, and the set that makes batches of them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_rl.core.episode import Prompt
from lit_rl.core.errors import DataError
from lit_rl.core.rollout import PromptBatch
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.data.splits import prompt_key
from lit_rl.data.visual_prompts import Processor, PromptVisuals, refuse_unequal_videos

DIGEST_BYTES = 16
"""Bytes of a digest of rows."""


@dataclass(frozen=True)
class PromptExample:
    """One row that passed every filter."""

    prompt: Prompt
    prompt_ids: list[int]
    columns: dict[str, Any]
    where: str
    shown: PromptVisuals | None = None
    """None: a prompt without images."""

    @property
    def key(self) -> str:
        """A text that is equal for rows of equal prompts and images."""
        return prompt_key(self.prompt, self.shown)


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
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for i in range(len(self)):
            digest.update(_as_bytes(self._row(i)))
        return digest.hexdigest()

    @functools.cached_property
    def digests(self) -> list[bytes]:
        """A digest of `DIGEST_BYTES` for each row, equal for rows of equal prompts, columns and images, whatever tokens
        they are. A column that is None counts as one that is not there."""

        def digest(prompt: Prompt, ids: list[int], columns: dict[str, Any], *shown: Any) -> bytes:
            given = {name: value for name, value in columns.items() if value is not None}
            return hashlib.blake2b(_as_bytes([prompt, given, *shown]), digest_size=DIGEST_BYTES).digest()

        return [digest(*self._row(i)) for i in range(len(self))]

    def _row(self, i: int) -> list[Any]:
        """Return the prompt of a row, its token ids, its columns and what it shows."""
        row: list[Any] = [
            self.prompts[i],
            self.prompt_ids[i],
            {name: values[i] for name, values in self.columns.items()},
        ]
        if self.shown and self.processor:
            shown = self.shown[i]
            row += [self.processor.name, list(map(str, shown.visuals)) if shown else []]
            row += shown.maker_of_videos(self.processor) if shown else []
        return row

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


def _as_bytes(row: Any) -> bytes:
    return json.dumps(row, sort_keys=True, skipkeys=True, default=_plain).encode()


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
