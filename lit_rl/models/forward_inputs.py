"""Inputs of a model's forward pass: keyword names, positions, masks, buckets of rows by length, noise on embeddings.

Positions are counted, or of three axes where a model rotates image tokens by row and column. Models of the Qwen VL
family give each token a time, a height and a width (M-RoPE, 2409.12191). Their own `get_rope_index` says which for a
prompt; behind it all three count on from its last token, and from the largest of the three where that shows
something. A video may last longer than the words behind it: its last moment is not what transformers counts on from.
Positions of one axis would be taken for three equal ones, without an error.

Masks: transformers leaves the causal mask out where nothing is padded, and looks for that on the device, so the host
waits. Without a mask it looks whether positions begin anew in a row, as they do where texts are packed. Both are
known where the host has a copy of the mask (`Completions.on_host`, `TokenBatch.on_host`), or made it itself to hide
padding, as a generator does. So two functions of transformers are replaced by ours, which answer from what this pass
knows and call the original otherwise.

Buckets: a pass over b rows costs b times its longest row. Cut into k calls of neighbours in length it costs the sum
over calls of their rows times their longest, and k times what a call costs beside its tokens. Rows do not see each
other, so the numbers are the same; the graphs of the calls are one graph, with one backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, find_packed_sequence_indices, sdpa_mask
from transformers.utils.import_utils import is_tracing

from lit_rl.core.examples import TokenBatch
from lit_rl.core.rollout import Completions
from lit_rl.core.transfers import to_device
from lit_rl.core.vision_inputs import Later, PromptVision
from lit_rl.models.trunk import base_of


def forward_parameters(model: nn.Module) -> frozenset[str]:
    """Return the parameter names of a model's forward pass, under a PEFT wrapper, which takes anything."""
    return frozenset(inspect.signature(base_of(model).forward).parameters)


def cache_name(model: nn.Module) -> Literal["cache", "past_key_values"] | None:
    """Return the name under which a model's forward pass takes its cache of keys and values; None: it takes none.

    transformers 5.24 says ``cache``; releases before it, and models with code of their own, ``past_key_values``.
    """
    parameters = forward_parameters(model)
    return "cache" if "cache" in parameters else "past_key_values" if "past_key_values" in parameters else None


def cache_input(model: nn.Module, cache: Any) -> dict[str, Any]:
    """Return the keyword that gives a cache to a model that takes one."""
    name = cache_name(model)
    assert name is not None
    return {name: cache}


def position_ids(model: nn.Module, completions: Completions, mask: Tensor) -> Tensor:
    """Return long ``(b, p + t)``, or ``(3, b, p + t)`` where a model has three axes and a row has images.

    Attended tokens, `mask` `(b, p + t)`, are counted, so padding changes nothing, also where positions are absolute
    (GPT-2).
    """
    counted = counted_positions(mask)
    find_axes = axes_of(model)
    if completions.vision is None or find_axes is None:
        return counted
    p = completions.prompt_ids.shape[1]
    positions = counted.expand(3, -1, -1).clone()
    for prompt in completions.vision.index.unique().tolist():
        vision = completions.vision.prompts[prompt]
        if vision is None:
            continue
        rows = (completions.vision.index == prompt).nonzero().flatten().to(counted.device)
        attended = completions.prompt_mask[rows[0]]
        axes = find_axes(completions.prompt_ids[rows[0]][attended], vision)
        positions[:, rows, p - axes.shape[1] : p] = axes[:, None]
        last = counted[rows, p - 1 : p]
        positions[:, rows, p:] = counted[rows, p:] - last + axes[:, -1].max()
    later = [tuple(image.moved(p) for image in row_images) for row_images in completions.vision.later]
    return _rotate_images(find_axes, positions, torch.cat([completions.prompt_ids, completions.response_ids], 1), later)


def later_positions(model: nn.Module, positions: Tensor, ids: Tensor, later: Sequence[tuple[Later, ...]]) -> Tensor:
    """Return long ``(b, s)`` or ``(3, b, s)``: positions of tokens ``(b, s)`` that count on, where images are among
    them.

    Args:
        model: A language model.
        positions: Long ``(b, s)``, as if all tokens were text.
        ids: Long ``(b, s)``.
        later: The images of each row, at their columns.
    """
    find_axes = axes_of(model)
    return (
        positions if find_axes is None else _rotate_images(find_axes, positions.expand(3, -1, -1).clone(), ids, later)
    )


def _rotate_images(find_axes: Any, positions: Tensor, ids: Tensor, later: Sequence[tuple[Later, ...]]) -> Tensor:
    """Return positions ``(3, b, s)`` of text, in which those of images are rotated and those behind count on."""
    for row, row_images in enumerate(later):
        for image in row_images:
            begin, end = image.column, image.column + image.tokens
            axes = find_axes(ids[row, begin:end], image.seen)
            first = positions[:, row, begin : begin + 1].clone()
            positions[:, row, begin:end] = first + axes
            positions[:, row, end:] += axes.max() + 1 - image.tokens
    return positions


def trunk_inputs(model: nn.Module, completions: Completions) -> dict[str, Tensor]:
    """Return prompt and response, and images beside them, as keyword arguments of the model's trunk."""
    assert completions.follows is None, "branches are rows of their own: lit_rl.core.branches.branches_of"
    ids, mask = completions.prompt_ids, completions.attention_mask.long()
    seen = {}
    if completions.vision is not None:
        seen = completions.vision.model_inputs(ids.shape[1], completions.response_ids.shape[1], ids.device)
    return {
        "input_ids": torch.cat([ids, completions.response_ids], dim=1),
        "attention_mask": mask,
        "position_ids": position_ids(model, completions, mask),
        **seen,
    }


def prompt_positions(model: nn.Module, ids: Tensor, mask: Tensor, prompts: Sequence[PromptVision | None]) -> Tensor:
    """Return long ``(n, p)`` or ``(3, n, p)``: positions of prompts alone.

    Args:
        model: A language model.
        ids: Long ``(n, p)``, padded on the left.
        mask: Bool ``(n, p)``.
        prompts: Images of each prompt.
    """
    counted, find_axes = counted_positions(mask), axes_of(model)
    if find_axes is None or not any(prompts):
        return counted
    positions = counted.expand(3, -1, -1).clone()
    for row, vision in enumerate(prompts):
        if vision is not None:
            axes = find_axes(ids[row][mask[row].bool()], vision)
            positions[:, row, positions.shape[2] - axes.shape[1] :] = axes
    return positions


def text_inputs(model: nn.Module, tokens: TokenBatch) -> dict[str, Tensor]:
    """Return positions of the tokens of texts, and images beside them, as keyword arguments of a model.

    Texts begin with their prompts and are padded on the right. Positions are long ``(b, s)``, or ``(3, b, s)`` where a
    model has three axes and a text has images.
    """
    counted, ids, find_axes = tokens.position_ids, tokens.input_ids, axes_of(model)
    if tokens.vision is None:
        return {"position_ids": counted}
    images = tokens.vision.inputs(ids.device) | tokens.vision.per_text_token(ids.shape[1], ids.device)
    if find_axes is None:
        return {"position_ids": counted, **images}
    positions = counted.expand(3, -1, -1).clone()
    for row, vision in enumerate(tokens.vision.rows):
        if vision is not None:
            n = len(next(iter(vision.per_token.values())))
            axes = find_axes(ids[row, :n], vision)
            positions[:, row, :n] = axes
            positions[:, row, n:] = counted[row, n:] - (n - 1) + axes[:, -1].max()
    return {"position_ids": positions, **images}


def counted_positions(mask: Tensor) -> Tensor:
    """Count the tokens before each attended token; padding gets 0 or the count of the token before."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def axes_of(model: nn.Module) -> Any:
    """Return the function that finds the axes of a prompt, ``(3, n)`` from its ids ``(n,)`` and its images. None: one
    axis."""
    base: Any = base_of(model)
    holders = (getattr(base, "model", None), getattr(getattr(base, "model", None), "model", None))  # one held on a CPU
    inner = next((holder for holder in holders if hasattr(holder, "get_rope_index")), None)
    if inner is None:
        return None

    def find(ids: Tensor, vision: PromptVision) -> Tensor:
        grids = {
            name: value.to(ids.device)
            for name, value in vision.inputs.items()
            if name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        }
        kinds = {name: value[None].to(ids.device) for name, value in vision.per_token.items() if name.startswith("mm_")}
        mask = torch.ones_like(ids)[None]
        positions, _ = inner.get_rope_index(ids[None], attention_mask=mask, **kinds, **grids)
        return positions[-3:, 0]

    return find


_MASK: ContextVar[Tensor | None] = ContextVar("known_mask", default=None)
_NO_SYNC: ContextVar[bool] = ContextVar("mask_hides", default=False)
_POSITIONS: ContextVar[Tensor | None] = ContextVar("known_positions", default=None)


@contextmanager
def known_masks(mask: Tensor | None = None, positions: Tensor | None = None) -> Iterator[None]:
    """Answer, inside, what models of transformers ask of their masks.

    Args:
        mask: Bool ``(b, s)`` in the host's memory: what the model is given as its attention mask. None: not known.
        positions: Long ``(b, s)`` in the host's memory: the positions that it is given beside no mask. None: not known.
    """
    tokens = _MASK.set(mask), _POSITIONS.set(positions)
    try:
        yield
    finally:
        _MASK.reset(tokens[0])
        _POSITIONS.reset(tokens[1])


@contextmanager
def masks_that_hide(device: torch.device) -> Iterator[None]:
    """Let models of transformers build attention masks without checking whether a mask hides anything.

    On an accelerator the check would make the host wait for the device. On a CPU it costs no wait, and is made.

    Args:
        device: Device of the models.
    """
    token = _NO_SYNC.set(device.type != "cpu")
    try:
        yield
    finally:
        _NO_SYNC.reset(token)


def _sdpa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *further: Any,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **arguments: Any,
) -> Tensor | None:
    """Return what transformers' ``sdpa_mask`` returns."""
    if attention_mask is not None and _NO_SYNC.get():
        allow_is_causal_skip = False
    known = _MASK.get()
    known = None if attention_mask is None or further or is_tracing(attention_mask) else known
    if allow_is_causal_skip and known is not None and attention_mask is not None:
        window = arguments.get("local_size")
        if attention_mask.shape == known.shape and kv_length == known.shape[1]:
            whole = window is None or kv_length < window
            if whole and q_length in (1, kv_length) and bool(known.all()):
                return None
            # Queries that are fewer than the keys, without a cache before them, are a static cache's: let it look.
            # So is an offset on a device, which is not known.
            offset = arguments.get("q_offset", 0)
            begins = isinstance(offset, Tensor) or offset == 0
            allow_is_causal_skip = whole and q_length != kv_length and begins
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        *further,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        **arguments,
    )


def _find_packed(position_ids: Tensor) -> Tensor | None:
    """Return what transformers' ``find_packed_sequence_indices`` returns."""
    known = _POSITIONS.get()
    if known is None or position_ids.shape != known.shape:
        return find_packed_sequence_indices(position_ids)
    found = find_packed_sequence_indices(known)
    return None if found is None else to_device(found, position_ids.device)


ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", _sdpa_mask)
masking_utils.find_packed_sequence_indices = _find_packed


CALL_ON_CPU, CALL_ON_GPU = 64, 4096
"""Tokens that could run in the time that a call takes beside its tokens."""

MAX_BUCKETS = 8


@dataclass(frozen=True)
class Bucket:
    """Rows of like length, which run in one call of the model."""

    rows: Tensor
    """Long, in the host's memory: their numbers."""
    width: int
    """Columns of the longest."""


def bucket_by_length(lengths: Tensor, device: torch.device) -> list[Bucket]:
    """Return the buckets in which a pass over rows is cheapest, from long rows to short ones; often one.

    Args:
        lengths: Long ``(b,)``, in the host's memory: columns that each row needs, b at least 1.
        device: Device of the pass.
    """
    order = lengths.argsort(descending=True, stable=True)
    falling = lengths[order].tolist()
    call = CALL_ON_CPU if device.type == "cpu" else CALL_ON_GPU

    def starts(count: int) -> list[int]:
        """Return the places where `tensor_split` cuts, the end included."""
        size, more = divmod(len(falling), count)
        return [i * size + min(i, more) for i in range(count + 1)]

    def cost(count: int) -> int:
        """Return the tokens of all calls, padding included, and those that could run in the time of the calls."""
        return sum(falling[start] * (stop - start) for start, stop in pairwise(starts(count))) + count * call

    count = min(range(1, min(MAX_BUCKETS, len(falling)) + 1), key=lambda number: (cost(number), number))
    return [Bucket(rows, int(falling[start])) for rows, start in zip(order.tensor_split(count), starts(count))]


def join_buckets(parts: Sequence[Tensor], buckets: Sequence[Bucket], width: int) -> Tensor:
    """Return ``(b, width)`` of the ``(rows, columns)`` of each bucket, whose columns are the first; 0 in the others.

    Of several numbers at each position, ``(rows, columns, k)``, the result is ``(b, width, k)``.
    """
    inner = (0, 0) * (parts[0].ndim - 2)
    wide = torch.cat([F.pad(part, (*inner, 0, width - part.shape[1])) for part in parts])
    order = torch.cat([bucket.rows for bucket in buckets]).argsort()
    return wide.index_select(0, to_device(order, wide.device))


@contextmanager
def noisy_embeddings(model: nn.Module, tokens: TokenBatch, alpha: float, keys: Sequence[int]) -> Iterator[None]:
    """Add noise to the embeddings that a forward pass over `tokens` reads, inside; outside the model is unchanged.

    The noise is uniform on +-alpha / sqrt(L d), with L the tokens of the token's own text and d the width of the
    embedding (2310.05914, algorithm 1; TRL's L is the padded row). It depends on the row's key and the row alone, not
    on padding, the other rows, a global generator or the device.

    Args:
        model: A language model, PEFT-wrapped or not.
        tokens: `b` rows.
        alpha: Scale of the noise, above 0.
        keys: A seed for each row, in `[0, 2^63)`.
    """

    def add(module: nn.Module, args: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        if not module.training:  # a trial of the model, on tokens of its own
            return embedded
        noise = _noise(tokens, embedded.shape[-1], alpha, keys).to(embedded.dtype)
        return embedded + to_device(noise.reshape(embedded.shape), embedded.device)

    handle = base_of(model).get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _noise(tokens: TokenBatch, width: int, alpha: float, keys: Sequence[int]) -> Tensor:
    """Return float32 `(b, s, d)` on the CPU, whose generator is the same everywhere; 0 at padding."""
    host = tokens.on_host
    attended = host.attention_mask
    noise = torch.zeros((*attended.shape, width), device="cpu")
    for row, (key, length) in enumerate(zip(keys, attended.sum(1).tolist(), strict=True)):
        generator = torch.Generator().manual_seed(key)
        torch.rand((length, width), generator=generator, out=noise[row, :length]).mul_(2).sub_(1)
    counted = attended.long()
    segment = torch.zeros_like(counted) if host.segment is None else host.segment
    tokens_of_text = torch.zeros_like(counted).scatter_add(1, segment, counted).gather(1, segment).clamp(min=1).float()
    return noise * (alpha / (tokens_of_text * width).sqrt()).unsqueeze(-1)
