"""Answers to what transformers asks of the masks of a pass, for which the host would wait for the device.

transformers leaves the causal mask out where nothing is padded, and looks for it on the device: is the mask full
everywhere? Without a mask it looks whether positions begin anew in a row, as they do where texts are packed. Both are
known where the host has a copy of the mask (`Completions.on_host`, `TokenBatch.on_host`), or made it itself to hide
padding, as a generator does. So its two functions are asked through ours, which answer where this pass has told them,
and hand on what is asked otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, find_packed_sequence_indices, sdpa_mask
from transformers.utils.import_utils import is_tracing

from lit_rl.transfers import to_device

_MASK: ContextVar[Tensor | None] = ContextVar("known_mask", default=None)
_HIDES: ContextVar[bool] = ContextVar("mask_hides", default=False)
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
    """Have models of transformers, inside, make whatever mask they are given, without a look for what it hides.

    On a CPU nobody waits, and they look.

    Args:
        device: Where the models are.
    """
    token = _HIDES.set(device.type != "cpu")
    try:
        yield
    finally:
        _HIDES.reset(token)


def _sdpa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *places: Any,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **asked: Any,
) -> Tensor | None:
    """Return what transformers' ``sdpa_mask`` returns."""
    if attention_mask is not None and _HIDES.get():
        allow_is_causal_skip = False
    known = _MASK.get()
    known = None if attention_mask is None or places or is_tracing(attention_mask) else known
    if allow_is_causal_skip and known is not None and attention_mask is not None:
        window = asked.get("local_size")
        if attention_mask.shape == known.shape and kv_length == known.shape[1]:
            whole = window is None or kv_length < window
            if whole and q_length in (1, kv_length) and bool(known.all()):
                return None
            # Queries that are fewer than the keys, without a cache before them, are a static cache's: let it look.
            allow_is_causal_skip = whole and q_length != kv_length and _begins(asked.get("q_offset", 0))
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        *places,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        **asked,
    )


def _begins(offset: int | Tensor) -> bool:
    """Tell whether queries may begin at the first key; yes for an offset on a device, which is not known."""
    return isinstance(offset, Tensor) or offset == 0


def _find_packed(position_ids: Tensor) -> Tensor | None:
    """Return what transformers' ``find_packed_sequence_indices`` returns."""
    known = _POSITIONS.get()
    if known is None or position_ids.shape != known.shape:
        return find_packed_sequence_indices(position_ids)
    found = find_packed_sequence_indices(known)
    return None if found is None else to_device(found, position_ids.device)


ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", _sdpa_mask)
masking_utils.find_packed_sequence_indices = _find_packed
