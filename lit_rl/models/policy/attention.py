"""An attention of our own in the place of a model's ``sdpa``: what all of them need to stand in for it strictly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_CHANGING = {"dynamic", "longrope"}
"""Kinds of rotary embeddings whose angles depend on the length of the text."""


def text_config(model: Any) -> Any:
    """Return the part of a model's config that its text layers read."""
    return model.config.get_text_config(decoder=True)


def queries_per_key(config: Any) -> float:
    """Return the number of query heads that a key head serves, by the config of text layers."""
    keys = getattr(config, "num_key_value_heads", None)
    return config.num_attention_heads / keys if keys else 1.0


@contextmanager
def attending_by(model: Any, implementation: str) -> Iterator[None]:
    """Let the model's layers look up this attention and its masks in transformers' registries, inside the context."""
    config = text_config(model)
    usual = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = usual


def layers_that_hold(cache: Any) -> list[Any]:
    """Return the layers of a cache that keep keys and values of their own.

    Some layers read those of earlier ones (Gemma 3n, Gemma 4); transformers 5.24 counts them, older ones do not.
    """
    empty = getattr(cache, "is_dummy", None) or [False] * len(cache.layers)
    return [layer for layer, holds_nothing in zip(cache.layers, empty, strict=True) if not holds_nothing]


def keeps_whole_texts(cache: Any, length: int) -> bool:
    """Tell whether every layer keeps the keys of ``length`` tokens, and no window ends before the first of them."""
    return all(
        type(layer) is DynamicLayer or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= length)
        for layer in cache.layers
    )


def turns_alike(model: nn.Module, length: int) -> bool:
    """Tell whether a token is rotated by the same angles in every text of at most ``length`` tokens.

    Dynamic NTK and LongRoPE look at the longest text of a call once it reaches a limit of the model.
    """
    rotaries = [part for part in model.modules() if hasattr(part, "rope_type")]
    changing = [part for part in rotaries if _CHANGING & _kinds(part.rope_type)]
    return all(length < _unchanged_below(part.config) for part in changing)


def _kinds(rope_type: Any) -> set[str]:
    """Return the kinds of a rotary embedding, which may have one for each kind of layer."""
    return set(rope_type.values()) if isinstance(rope_type, dict) else {rope_type}


def _unchanged_below(config: Any) -> int:
    """Return the tokens of the shortest text that may change the angles."""
    settings = config.rope_parameters or {}
    every = [settings, *(part for part in settings.values() if isinstance(part, dict))]
    limits = [
        part["original_max_position_embeddings"] for part in every if part.get("original_max_position_embeddings")
    ]
    return min([config.max_position_embeddings, *limits])


def is_causal(mask: Tensor) -> bool:
    """Tell whether each of the last tokens sees all tokens before it, and itself, and nothing else: ``(b, 1, t,
    s)``."""
    t, s = mask.shape[-2:]
    plain = torch.ones(t, s, dtype=torch.bool, device=mask.device).tril(s - t)
    return mask.dtype == torch.bool and bool((mask == plain).all())


def plain_attention(
    module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Return ``(b, h, t, e)``, as transformers' own ``sdpa`` computes it."""
    return sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling)[0].transpose(1, 2)
