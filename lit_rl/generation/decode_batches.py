"""Decode batches: prompts cut into batches for a decoder of this process, and its responses joined again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_rl.core.rollout import Completions, Prompts
from lit_rl.core.transfers import in_one_transfer
from lit_rl.core.vision_inputs import Later, PromptVision, Vision
from lit_rl.generation import noise


@dataclass(frozen=True)
class DecodeBatch:
    """Rows that are decoded together: ``repeats`` completions of each of ``n`` prompts, neighbours by prompt."""

    prompt_ids: Tensor
    """Long ``(n, p)``, padded on the left."""
    prompt_mask: Tensor
    """Bool ``(n, p)``."""
    repeats: int
    keys: Tensor
    """Int64 ``(n * repeats,)``: the noise key of each row."""
    rows: Tensor
    """Long ``(n * repeats,)``, on the CPU: where each row stands in the completions."""
    numbers: Sequence[int]
    """The indices of the ``n`` prompts in the request."""
    begun: Tensor | None = None
    """Long ``(n * repeats,)``: tokens of each response that are part of the prompt here. None: none."""
    vision: tuple[PromptVision | None, ...] = ()
    """The images of each of the ``n`` prompts; empty where the request has none."""
    padded: bool = True
    """False where no prompt is padded, by the lengths on the host: no query of the device is needed."""

    def repeated(self) -> tuple[Tensor, Tensor]:
        """Return prompt ids and mask of every row, both ``(n * repeats, p)``."""
        return self.prompt_ids.repeat_interleave(self.repeats, 0), self.prompt_mask.repeat_interleave(self.repeats, 0)


@dataclass(frozen=True)
class Decoded:
    """The responses of a decode batch, with arbitrary padding on the right; fields as in ``Completions``."""

    ids: Tensor
    mask: Tensor
    logprobs: Tensor
    ended: Tensor
    kept_logmass: Tensor | None
    attended: Tensor | None = None
    turn: Tensor | None = None
    later: tuple[tuple[Later, ...], ...] | None = None
    """The images in each row's response. None: there are none."""


def left_pad(token_ids: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return long ids and bool mask, both ``(n, p)``, on the CPU."""
    width = max(map(len, token_ids))
    lengths = torch.tensor([len(ids) for ids in token_ids])
    ids = torch.tensor([[pad_id] * (width - len(ids)) + list(ids) for ids in token_ids])
    return ids, torch.arange(width) >= width - lengths[:, None]


def has_padding(token_ids: Sequence[Sequence[int]]) -> bool:
    """Tell whether `left_pad` pads any of them."""
    return len({len(ids) for ids in token_ids}) > 1


class WaitingRows:
    """Rows that are still to be decoded, as batches that fit into the free places.

    A batch has whole groups, or a slice of one group larger than all places. Prompts of similar length stand together,
    the longest first: little padding, and a lack of memory shows immediately.

    Args:
        prompts: The requested completions.
        places: Rows that may be decoded at a time, 1 or more; None: all.
        device: The device of the batches.
    """

    def __init__(self, prompts: Prompts, places: int | None, device: torch.device) -> None:
        group, n = prompts.group_size, len(prompts)
        self._prompts, self._device = prompts, device
        self._keys = noise.row_keys(prompts.keys, group)
        self._slice = group if places is None else math.ceil(group / math.ceil(group / places))
        together = places is None or places >= n * group
        order = range(n) if together else sorted(range(n), key=lambda i: -len(prompts.token_ids[i]))
        self.groups = deque((i, first) for i in order for first in range(0, group, self._slice))
        """Prompts, each with the first sample of a slice of its group, that were not taken yet."""

    def take(self, places: int | None) -> DecodeBatch | None:
        """Return the next rows, as many as fit into the places; None where the next group, or slice of one, does
        not."""
        prompts, group = self._prompts, self._prompts.group_size
        count = len(self.groups) if places is None else min(places // self._slice, len(self.groups))
        if self._slice < group:
            count = min(count, 1)
        if count <= 0:
            return None
        taken = [self.groups.popleft() for _ in range(count)]
        chosen, first = [i for i, _ in taken], taken[0][1]
        samples = torch.arange(first, min(first + self._slice, group))
        rows = (torch.tensor(chosen)[:, None] * group + samples).flatten()
        texts = [prompts.token_ids[i] for i in chosen]
        ids, mask, keys = in_one_transfer(self._device, *left_pad(texts, prompts.pad_id), self._keys[rows])
        seen = tuple(prompts.vision[i] for i in chosen) if prompts.vision else ()
        padded = has_padding(texts)
        return DecodeBatch(ids, mask, len(samples), keys, rows, chosen, vision=seen, padded=padded)


def decode_batches(prompts: Prompts, batch_size: int | None, device: torch.device) -> Iterator[DecodeBatch]:
    """Yield all rows in batches of at most ``batch_size``, as `WaitingRows` makes them."""
    waiting = WaitingRows(prompts, batch_size, device)
    while batch := waiting.take(batch_size):
        yield batch


def assemble(
    prompts: Prompts, decoded: Sequence[tuple[Tensor, Decoded]], *, version: int, device: torch.device
) -> Completions:
    """Join decoded batches, each with its row numbers, in the order of the prompts."""
    places = [rows for rows, _ in decoded]
    ids, mask, *placed = in_one_transfer(device, *left_pad(prompts.token_ids, prompts.pad_id), *places)
    ids, mask = (part.repeat_interleave(prompts.group_size, 0) for part in (ids, mask))
    shape = (len(ids), max(part.ids.shape[1] for _, part in decoded))

    def joined(name: str, fill: float, within: str = "mask") -> Tensor:
        parts = [getattr(part, name).masked_fill(~getattr(part, within), fill) for _, part in decoded]
        whole = torch.full(shape, fill, dtype=parts[0].dtype, device=device)
        for rows, values in zip(placed, parts, strict=True):
            whole[rows, : values.shape[1]] = values
        return whole

    ended = torch.zeros(shape[0], dtype=torch.bool, device=device)
    for rows, (_, part) in zip(placed, decoded, strict=True):
        ended[rows] = part.ended
    turns = decoded[0][1].attended is not None
    later: list[tuple[Later, ...]] = [()] * len(ids)
    for rows, part in decoded:
        for row, seen in zip(rows.tolist(), part.later or ()):
            later[row] = seen
    return Completions(
        prompt_ids=ids,
        prompt_mask=mask,
        response_ids=joined("ids", prompts.pad_id, "attended" if turns else "mask"),
        response_mask=joined("mask", False),
        sampler_logprobs=joined("logprobs", 0.0),
        ended=ended,
        group_id=torch.arange(len(prompts), device=device).repeat_interleave(prompts.group_size),
        version=version,
        attended=joined("attended", False, "attended") if turns else None,
        kept_logmass=None if decoded[0][1].kept_logmass is None else joined("kept_logmass", 0.0),
        turn=joined("turn", 0, "attended") if turns else None,
        vision=Vision.of(prompts.vision or [None] * len(prompts), prompts.group_size, later),
    )
