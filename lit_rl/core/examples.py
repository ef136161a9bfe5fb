"""Batches of the methods that learn from a data set: one micro-batch of an optimizer step.

Letters of shapes: ``b`` rows, ``s`` tokens of a row, padded on the right. Pairs are ``2 b`` rows: all chosen
ones, then all rejected ones, in the same order; triples ``3 b``, with the references behind. Dataclasses are not
declared frozen because Lightning's precision plugins rebuild every batch field by field; treat them as frozen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lit_rl.core.transfers import CopiedToHost, HostCopy, to_device
from lit_rl.core.vision_inputs import Vision


@dataclass
class TokenBatch(CopiedToHost):
    """Texts as tokens, padded on the right."""

    input_ids: Tensor
    """Long ``(b, s)``."""
    attention_mask: Tensor
    """Bool ``(b, s)``: True on tokens of the text, False on padding."""
    loss_mask: Tensor
    """Bool ``(b, s)``: True on tokens that are learned. Never the first of a row (or of a packed text), which nothing
    predicts."""
    segment: Tensor | None = None
    """Long ``(b, s)``: which text of a packed row a token belongs to, from 0. None where every row is one text."""
    vision: Vision | None = None
    """Vision inputs of the prompts with which the rows begin. None where no row has images."""
    host: HostCopy | None = dataclasses.field(default=None, repr=False, compare=False)
    """Host copies of rows that `to` moved to a device. None where they are in the host's memory, or unknown."""

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def device(self) -> torch.device:
        """The device on which the tokens lie."""
        return self.input_ids.device

    @property
    def _columns(self) -> dict[str, Tensor]:
        columns = {name: getattr(self, name) for name in ("input_ids", "attention_mask", "loss_mask", "segment")}
        return {name: column for name, column in columns.items() if column is not None}

    @property
    def position_ids(self) -> Tensor:
        """Long ``(b, s)``: place of each token in its own text, from 0."""
        attended = self.attention_mask.long()
        running = attended.cumsum(1) - 1
        if self.segment is None:
            return running.clamp(min=0)
        starts = torch.ones_like(self.segment, dtype=torch.bool)
        starts[:, 1:] = self.segment[:, 1:] != self.segment[:, :-1]
        first = torch.where(starts, running, torch.zeros_like(running)).cummax(1).values
        return (running - first).clamp(min=0)

    @property
    def learned(self) -> Tensor:
        """Bool ``(b, s - 1)``: the loss mask of the predicting positions, one to the left of the predicted token."""
        return self.loss_mask[:, 1:]

    def take(self, rows: slice | Tensor, width: int | None = None) -> TokenBatch:
        """Return some of the rows (best given in the host's memory), cut to the first `width` columns if that is
        given."""
        here = rows.cpu() if isinstance(rows, Tensor) else rows
        there = to_device(here, self.input_ids.device) if isinstance(here, Tensor) else here
        segment = None if self.segment is None else self.segment[there, :width]
        found = TokenBatch(
            self.input_ids[there, :width],
            self.attention_mask[there, :width],
            self.loss_mask[there, :width],
            segment,
            None if self.vision is None else self.vision.select(torch.arange(len(self))[here]),
        )
        kept = None if self.host is None else self.kept_on_host
        return found if kept is None else found.with_host(kept.take(here, width))

    def to(self, device: Any) -> TokenBatch:
        """Return the same batch with its tensors on the device, keeping the host's copy."""
        moved = dataclasses.replace(_to(self, device), host=None)
        here = self.input_ids.device.type == "cpu"
        return moved.with_host(self) if here else moved


@dataclass(frozen=True)
class Totals:
    """The counts of a whole optimizer step, over all its micro-batches on all ranks. Known before it begins."""

    rows: int
    """Rows of the step: texts, packed rows, pairs or verdicts."""
    tokens: int
    """Tokens that are learned: ``loss_mask``. Of pairs: those of the chosen texts; of triples: of the references."""
    attended: int
    """Tokens that are not padding, all texts together."""
    shares: int = 1
    """Micro-batches of the step, over all ranks."""
    chosen_attended: int = 0
    """Tokens of the chosen texts of pairs, prompts included. 0 for other kinds."""
    desirable: int = 0
    """Desirable rows, for verdicts. 0 for other kinds."""
    texts: tuple[int, ...] = ()
    """Tokens of each text; of those that share a row too."""
    learned: int = 0
    """Tokens that are learned, of all texts: of both of a pair."""


@dataclass
class ExampleBatch:
    """A micro-batch: the base of all kinds."""

    tokens: TokenBatch
    """The policy's input: ``b`` rows, for pairs ``2 b``, for triples ``3 b``."""
    rows: list[int]
    """Index of each of the ``b`` rows in its data set."""
    totals: Totals
    step: int = 0
    """Number of the optimizer step since the start of the run, over all epochs."""
    slot: int = 0
    """Index of this micro-batch in its step, on this rank."""
    whole: tuple[ExampleBatch, ...] = ()
    """All micro-batches of this rank's step, in their order, where this is the first of several; empty elsewhere."""
    ref_logprobs: Tensor | None = None
    """Float32 ``(b, s - 1)`` (``2 b`` for pairs): precomputed log-probs of the reference. None where there are none."""

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: Any) -> Self:
        """Return the same batch with its tensors on the device; `whole` stays where it is until it is needed."""
        return _to(self, device)


@dataclass
class TextBatch(ExampleBatch):
    """Texts to imitate."""


@dataclass
class PairBatch(ExampleBatch):
    """Chosen and rejected completions of one prompt: rows ``i`` and ``b + i`` of `tokens`. Both are learned from. Of
    triples row ``2 b + i`` is the reference."""

    margins: Tensor | None = None
    """Float32 ``(b,)``: by how much the chosen one is better, if the data have margins."""


@dataclass
class VerdictBatch(ExampleBatch):
    """Single completions that were found desirable or not."""

    desirable: Tensor | None = None
    """Bool ``(b,)``. Always set; None only because a dataclass wants a default here."""
    mismatched: TokenBatch | None = None
    """``b`` rows: each prompt with the completion of the nearest row before it in the step that answers another prompt
    (around the end)."""


@dataclass
class StepwiseBatch(ExampleBatch):
    """Solutions whose steps are labelled: ``loss_mask`` is True on the last token of each step that has a label."""

    labels: Tensor | None = None
    """Float32 ``(b, s)``: 1 where the step that ends here is right, 0 where it is wrong or no step ends. Always set."""


def _to(item: Any, device: Any) -> Any:
    """Return a copy with tensors, and token batches and mappings of tensors, on the device; anything else stays."""
    changes = {}
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = to_device(value, torch.device(device))
        elif isinstance(value, TokenBatch):
            changes[field.name] = value.to(device)
        elif isinstance(value, Mapping):
            changes[field.name] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in value.items()}
    return dataclasses.replace(item, **changes)
