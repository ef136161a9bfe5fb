"""Where tokens stand in a text: counted, or of three axes where a model turns image tokens by row and column.

Models of the Qwen VL family give each token a time, a height and a width (M-RoPE, 2409.12191). Their own
`get_rope_index` says which for a prompt; behind it all three count on from its last token, and from the largest of the
three where that shows something. A video may last longer than the words behind it: its last moment is not what
transformers counts on from. Positions of one axis would be taken for three equal ones, without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.examples import TokenBatch
from lit_rl.models.policy.trunk import base_of
from lit_rl.rollout import Completions
from lit_rl.vision import Later, PromptVision


def position_ids(model: nn.Module, completions: Completions) -> Tensor:
    """Return long ``(b, p + t)``, or ``(3, b, p + t)`` where a model has three axes and a row has images.

    Attended tokens are counted, so padding changes nothing, also where positions are absolute (GPT-2).
    """
    counted = counted_positions(completions.attention_mask)
    finds = axes_of(model)
    if completions.vision is None or finds is None:
        return counted
    p = completions.prompt_ids.shape[1]
    found = counted.expand(3, -1, -1).clone()
    for prompt in completions.vision.index.unique().tolist():
        vision = completions.vision.prompts[prompt]
        if vision is None:
            continue
        rows = (completions.vision.index == prompt).nonzero().flatten().to(counted.device)
        there = completions.prompt_mask[rows[0]]
        axes = finds(completions.prompt_ids[rows[0]][there], vision)
        found[:, rows, p - axes.shape[1] : p] = axes[:, None]
        last = counted[rows, p - 1 : p]
        found[:, rows, p:] = counted[rows, p:] - last + axes[:, -1].max()
    later = [tuple(each.moved(p) for each in of) for of in completions.vision.later]
    return _turned(finds, found, torch.cat([completions.prompt_ids, completions.response_ids], 1), later)


def later_positions(model: nn.Module, positions: Tensor, ids: Tensor, later: Sequence[tuple[Later, ...]]) -> Tensor:
    """Return long ``(b, s)`` or ``(3, b, s)``: positions of tokens ``(b, s)`` that count on, where images are among
    them.

    Args:
        model: A language model.
        positions: Long ``(b, s)``, as if all tokens were text.
        ids: Long ``(b, s)``.
        later: The images of each row, at their columns.
    """
    finds = axes_of(model)
    return positions if finds is None else _turned(finds, positions.expand(3, -1, -1).clone(), ids, later)


def _turned(finds: Any, found: Tensor, ids: Tensor, later: Sequence[tuple[Later, ...]]) -> Tensor:
    """Return positions ``(3, b, s)`` of text, in which those of images are rotated and those behind count on."""
    for row, of in enumerate(later):
        for each in of:
            begin, end = each.column, each.column + each.tokens
            axes = finds(ids[row, begin:end], each.seen)
            first = found[:, row, begin : begin + 1].clone()
            found[:, row, begin:end] = first + axes
            found[:, row, end:] += axes.max() + 1 - each.tokens
    return found


def trunk_inputs(model: nn.Module, completions: Completions) -> dict[str, Tensor]:
    """Return prompt and response, and images beside them, as keyword arguments of the model's trunk."""
    ids, mask = completions.prompt_ids, completions.attention_mask.long()
    seen = {}
    if completions.vision is not None:
        seen = completions.vision.model_inputs(ids.shape[1], completions.response_ids.shape[1], ids.device)
    return {
        "input_ids": torch.cat([ids, completions.response_ids], dim=1),
        "attention_mask": mask,
        "position_ids": position_ids(model, completions),
        **seen,
    }


def prompt_positions(model: nn.Module, ids: Tensor, mask: Tensor, prompts: Sequence[PromptVision | None]) -> Tensor:
    """Return long ``(n, p)`` or ``(3, n, p)``: positions of prompts alone.

    Args:
        model: A language model.
        ids: Long ``(n, p)``, padded on the left.
        mask: Bool ``(n, p)``.
        prompts: What each of them shows.
    """
    counted, finds = counted_positions(mask), axes_of(model)
    if finds is None or not any(prompts):
        return counted
    found = counted.expand(3, -1, -1).clone()
    for row, vision in enumerate(prompts):
        if vision is not None:
            axes = finds(ids[row][mask[row].bool()], vision)
            found[:, row, found.shape[2] - axes.shape[1] :] = axes
    return found


def text_positions(model: nn.Module, tokens: TokenBatch) -> Tensor:
    """Return long ``(b, s)`` or ``(3, b, s)``, for texts that begin with their prompts and are padded on the right."""
    counted, finds = tokens.position_ids, axes_of(model)
    if tokens.vision is None or finds is None:
        return counted
    found = counted.expand(3, -1, -1).clone()
    for row, vision in enumerate(tokens.vision.rows):
        if vision is not None:
            n = len(next(iter(vision.per_token.values())))
            axes = finds(tokens.input_ids[row, :n], vision)
            found[:, row, :n] = axes
            found[:, row, n:] = counted[row, n:] - (n - 1) + axes[:, -1].max()
    return found


def text_inputs(model: nn.Module, tokens: TokenBatch) -> dict[str, Tensor]:
    """Return positions of the tokens of texts, and images beside them, as keyword arguments of a model."""
    found = {"position_ids": text_positions(model, tokens)}
    if tokens.vision is not None:
        ids = tokens.input_ids
        found |= tokens.vision.inputs(ids.device) | tokens.vision.per_text_token(ids.shape[1], ids.device)
    return found


def counted_positions(mask: Tensor) -> Tensor:
    """Count the tokens before each attended token; padding gets 0 or the count of the token before."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def axes_of(model: nn.Module) -> Any:
    """Return the function that finds the axes of a prompt, ``(3, n)`` from its ids ``(n,)`` and its images. None: one
    axis."""
    base: Any = base_of(model)
    homes = (getattr(base, "model", None), getattr(getattr(base, "model", None), "model", None))  # one held on a CPU
    inner = next((home for home in homes if hasattr(home, "get_rope_index")), None)
    if inner is None:
        return None

    def find(ids: Tensor, vision: PromptVision) -> Tensor:
        shown = {
            name: value.to(ids.device)
            for name, value in vision.inputs.items()
            if name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        }
        kinds = {name: value[None].to(ids.device) for name, value in vision.per_token.items() if name.startswith("mm_")}
        mask = torch.ones_like(ids)[None]
        positions, _ = inner.get_rope_index(ids[None], attention_mask=mask, **kinds, **shown)
        return positions[-3:, 0]

    return find
