"""Examples, rendered and tokenised once, and the set that makes batches of them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lit_rl.core.episode import Prompt
from lit_rl.core.examples import ExampleBatch, PairBatch, StepwiseBatch, TextBatch, TokenBatch, Totals, VerdictBatch
from lit_rl.core.vision_inputs import Vision
from lit_rl.data.kinds import Kind
from lit_rl.data.prompt_set import PromptExample, PromptSet
from lit_rl.data.splits import prompt_key
from lit_rl.data.visual_prompts import Processor, PromptVisuals, refuse_unequal_videos


@dataclass(frozen=True)
class Encoded:
    """A text as tokens."""

    ids: list[int]
    learned: list[bool]
    """True on tokens that are learned; never the first. As long as ``ids``."""
    prompt_tokens: int
    """Tokens of the prompt that are left of it at the start; 0 for a text without a prompt."""
    shown: PromptVisuals | None = None
    """The visuals of its prompt; None: no images."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Example:
    """One row that passed every filter."""

    texts: tuple[Encoded, ...]
    """One text; of a pair the chosen one and the rejected one, of a triple the reference too, which begin with the same
    prompt tokens."""
    where: str
    """Place of the row, for messages."""
    prompt: Prompt | None = None
    """The prompt that validation generates from and rewards see; None for a text without one, and for the further rows
    of a conversation."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, for rewards."""
    margin: float | None = None
    """Pairs: by how much the chosen one is better, where the data say so."""
    desirable: bool | None = None
    """Verdicts: whether the completion was found good."""
    shown: PromptVisuals | None = None
    """The visuals of the prompt; None: no images."""
    labels: tuple[float, ...] = ()
    """Labelled steps: 1 or 0 for each learned token of the text, in their order."""
    conversation: str = ""
    """The key that several rows of one conversation have in common; empty for a row of its own."""

    @property
    def key(self) -> str:
        """A text that is equal for rows of equal prompts and images, and for rows of one conversation, so that these
        are held out together; a text without a prompt is its own."""
        if self.conversation:
            return self.conversation
        return json.dumps(self.texts[0].ids) if self.prompt is None else prompt_key(self.prompt, self.shown)


@dataclass(frozen=True)
class ExampleSet:
    """The rows that are left. A row's index here is its name for the rest of the run."""

    kind: Kind
    examples: Sequence[Example]
    pad_id: int
    packs: Sequence[Sequence[Encoded]] | None = None
    """Texts: the pieces of each packed row, which are then the rows. None where every example is a row."""
    processor: Processor | None = None
    """Makes pixels of what prompts show."""

    def __post_init__(self) -> None:
        refuse_unequal_videos(self.processor, (example.shown for example in self.examples))

    def __len__(self) -> int:
        return len(self.examples) if self.packs is None else len(self.packs)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for equal tokens, masks and labels in the same order."""
        digest = hashlib.blake2b(f"{self.kind} {self.pad_id}".encode(), digest_size=16)
        for row in range(len(self)):
            pieces = [(text.ids, [int(token) for token in text.learned]) for text in self._pieces(row)]
            example = None if self.packs is not None else self.examples[row]
            label = None if example is None else [example.margin, example.desirable, list(example.labels)]
            digest.update(json.dumps([pieces, label]).encode())
            if example is not None and self.processor and (shown := example.shown):
                made_by = [self.processor.name, *shown.maker_of_videos(self.processor)]
                digest.update(json.dumps([*made_by, *map(str, shown.visuals)]).encode())
        return digest.hexdigest()

    @functools.cached_property
    def prompts(self) -> PromptSet:
        """The distinct prompts, with the columns of the first row of each: what validation generates from."""
        first: dict[str, Example] = {}
        for example in self.examples:
            if example.prompt is not None:
                first.setdefault(example.key, example)
        examples = []
        for each in first.values():
            ids = each.texts[0].ids[: each.texts[0].prompt_tokens]
            examples.append(PromptExample(each.prompt or "", ids, each.columns, each.where, each.shown))
        return PromptSet.of(examples, self.processor)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(map(self.length, range(len(self))))

    def length(self, row: int) -> int:
        """Return the tokens of a row: of a packed one all together, of several texts those of the longest."""
        lengths = map(len, self._pieces(row))
        return sum(lengths) if self.packs else max(lengths)

    @functools.cached_property
    def most_learned(self) -> int:
        """Tokens that are learned, of the row that has most of them; of a row with several texts those of one."""
        counts = [[sum(text.learned) for text in self._pieces(row)] for row in range(len(self))]
        return max(sum(texts) if self.packs else max(texts) for texts in counts)

    def totals(self, rows: Sequence[int], shares: int = 1) -> Totals:
        """Return the totals of an optimizer step of these rows."""
        texts = [self._pieces(row) for row in rows]
        which = {"pairs": slice(0, 1), "triples": slice(2, 3)}.get(self.kind, slice(None))
        learned = [row[which] for row in texts]
        return Totals(
            rows=len(rows),
            tokens=sum(sum(text.learned) for row in learned for text in row),
            attended=sum(len(text) for row in texts for text in row),
            shares=shares,
            chosen_attended=sum(len(row[0]) for row in texts) if self.kind == "pairs" else 0,
            desirable=sum(bool(self.examples[row].desirable) for row in rows) if self.kind == "verdicts" else 0,
            texts=tuple(len(text) for row in texts for text in row),
            learned=sum(sum(text.learned) for row in texts for text in row),
        )

    def before(self, rows: Sequence[int]) -> list[int]:
        """Return, for each row of a step, the nearest row before it (cyclically) with another prompt; the row just
        before it where all prompts are equal."""
        prompts = [self._prompt(row) for row in rows] if self.kind == "verdicts" else []
        found = []
        for i in range(len(rows)):
            others = (i - back for back in range(1, len(prompts)) if prompts[i - back] != prompts[i])
            found.append(rows[next(others, i - 1)])
        return found

    def _prompt(self, row: int) -> tuple[list[int], list[str]]:
        """Return the tokens and visuals of a row's prompt."""
        example = self.examples[row]
        text, shown = example.texts[0], example.shown
        return text.ids[: text.prompt_tokens], [] if shown is None else list(map(str, shown.visuals))

    def batch(
        self, rows: Sequence[int], before: Sequence[int], totals: Totals, *, step: int, slot: int, width: int = 0
    ) -> ExampleBatch:
        """Return the given rows as a micro-batch.

        Args:
            rows: Rows of this micro-batch.
            before: For each of them a row of the step with another prompt, whose completion the verdict is compared
                with.
            totals: Totals of the step.
            step: Number of the step.
            slot: Number of this micro-batch.
            width: Columns of its tokens, at least.
        """
        common: dict[str, Any] = {"rows": list(rows), "totals": totals, "step": step, "slot": slot}
        if self.packs is not None:
            return TextBatch(token_batch([self.packs[row] for row in rows], self.pad_id, width), **common)
        examples = [self.examples[row] for row in rows]
        texts = [[text] for part in zip(*(example.texts for example in examples)) for text in part]
        tokens = replace(token_batch(texts, self.pad_id, width), vision=self._vision(rows, len(texts) // len(rows)))
        if self.kind in ("pairs", "triples"):
            margins = [example.margin for example in examples]
            known = None if any(margin is None for margin in margins) else torch.tensor(margins)
            return PairBatch(tokens, **common, margins=known)
        if self.kind == "verdicts":
            pairs = [(example, self.examples[other]) for example, other in zip(examples, before)]
            mismatched = token_batch([[_mismatched(*pair)] for pair in pairs], self.pad_id)
            mismatched = replace(mismatched, vision=tokens.vision)
            desirable = torch.tensor([bool(example.desirable) for example in examples])
            return VerdictBatch(tokens, **common, desirable=desirable, mismatched=mismatched)
        if self.kind == "stepwise":
            mask, labels = tokens.loss_mask, torch.zeros(tokens.loss_mask.shape)
            for row, example in enumerate(examples):
                labels[row, mask[row]] = torch.tensor(example.labels)
            return StepwiseBatch(tokens, **common, labels=labels)
        return TextBatch(tokens, **common)

    def _vision(self, rows: Sequence[int], texts: int) -> Vision | None:
        """Return the vision inputs of `texts` texts for each row, all first ones before all second ones."""
        if self.processor is None:
            return None
        shown = [self.examples[row].shown for row in rows]
        made = [each and each.vision(self.processor, row) for each, row in zip(shown, rows)]
        made = [seen and seen.first(self.examples[row].texts[0].prompt_tokens) for seen, row in zip(made, rows)]
        seen = Vision.of(made, 1)
        return None if seen is None else seen.select(torch.arange(len(rows)).repeat(texts))

    def _pieces(self, row: int) -> Sequence[Encoded]:
        return self.examples[row].texts if self.packs is None else self.packs[row]


def token_batch(rows: Sequence[Sequence[Encoded]], pad_id: int, width: int = 0) -> TokenBatch:
    """Return rows of pieces, padded on the right to `width` columns or more, with segments where a row has several
    pieces."""
    width = max(2, width, *(sum(map(len, pieces)) for pieces in rows))
    input_ids = torch.full((len(rows), width), pad_id)
    attended, learned = (torch.zeros((len(rows), width), dtype=torch.bool) for _ in range(2))
    segment = torch.zeros((len(rows), width), dtype=torch.long)
    for row, pieces in enumerate(rows):
        start = 0
        for number, piece in enumerate(pieces):
            place = slice(start, start + len(piece))
            input_ids[row, place] = torch.tensor(piece.ids)
            learned[row, place] = torch.tensor(piece.learned)
            learned[row, start] = False
            segment[row, start:] = number
            start += len(piece)
        attended[row, :start] = True
    packed = any(len(pieces) > 1 for pieces in rows)
    return TokenBatch(input_ids, attended, learned, segment if packed else None)


def _mismatched(example: Example, other: Example) -> Encoded:
    """Return the prompt of one example with the completion of the other."""
    (own,), (another,) = example.texts, other.texts
    prompt, completion = own.ids[: own.prompt_tokens], another.ids[another.prompt_tokens :]
    learned = [False] * len(prompt) + another.learned[another.prompt_tokens :]
    return Encoded(prompt + completion, learned, len(prompt))
