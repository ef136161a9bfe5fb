"""Rows that hold token ids already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.data.message_forms import list_of
from lit_rl.errors import DataError

IGNORED = -100
"""The label of a token that is not learned."""


def masked_tokens(found: Mapping[str, Any], where: str, learn: str) -> tuple[list[int], list[bool]]:
    """Return the ids of a row, and the mask of those that are learned.

    `labels` (-100 where a token is not learned) settle it alone. Otherwise `all` learns every token; `completion` those
    that every mask given allows (`completion_mask`, `assistant_masks`), all where none is; `assistant` needs
    `assistant_masks`. Tokens whose `attention_mask` is 0 are padding, and are left out.

    Raises:
        DataError: a column is no list of integers as long as `input_ids`, labels are other tokens than the ids, or
            `assistant_masks` is missing.
    """
    ids = _integers(found, "input_ids", where, None)
    masks = {
        name: _integers(found, name, where, len(ids))
        for name in ("labels", "completion_mask", "assistant_masks", "attention_mask")
        if name in found
    }
    for name, mask in masks.items():
        if name != "labels" and not set(mask) <= {0, 1}:
            raise DataError(f"{where}: {name} holds {excerpt(repr(mask))}; only 0 and 1 are allowed.")
    if min(ids, default=0) < 0:
        raise DataError(f"{where}: input_ids holds {min(ids)}; a token id is 0 or more.")
    if any(label not in (IGNORED, token) for label, token in zip(masks.get("labels", ()), ids)):
        raise DataError(f"{where}: labels holds other tokens than input_ids; each is the same token or {IGNORED}.")
    learned = _learned(masks, len(ids), learn, where)
    kept = masks.get("attention_mask", [1] * len(ids))
    return [t for t, keep in zip(ids, kept) if keep], [flag for flag, keep in zip(learned, kept) if keep]


def _learned(masks: Mapping[str, list[int]], size: int, learn: str, where: str) -> list[bool]:
    if "labels" in masks:
        return [label != IGNORED for label in masks["labels"]]
    if learn == "all":
        return [True] * size
    if learn == "assistant" and "assistant_masks" not in masks:
        raise DataError(
            f"{where}: data.learn=assistant needs the column assistant_masks beside input_ids (1 on tokens that the "
            "assistant wrote), or labels; without them set data.learn to completion or all."
        )
    given = [masks[name] for name in ("completion_mask", "assistant_masks") if name in masks]
    return [all(mask[i] for mask in given) for i in range(size)]


def _integers(found: Mapping[str, Any], name: str, where: str, size: int | None) -> list[int]:
    values = list_of(found[name])
    whole = isinstance(values, list) and all(isinstance(value, int) for value in values)
    if not whole:
        raise DataError(f"{where}: {name} is {excerpt(repr(values))}; a list of integers is needed.")
    if size is not None and len(values) != size:
        raise DataError(f"{where}: {name} has {len(values)} values, input_ids has {size}; they must be as many.")
    return [int(value) for value in values]
