"""All that an object of ours holds, as values that can be compared before and after a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def state_of(item: Any, seen: dict[int, Any] | None = None) -> Any:
    """What the item holds, to the last attribute; weights and other tensors as copies."""
    seen = {} if seen is None else seen
    if id(item) in seen:
        return "seen"
    if isinstance(item, Tensor):
        return item.detach().clone()
    if isinstance(item, Mapping):
        seen[id(item)] = item
        return {str(key): state_of(value, seen) for key, value in item.items()}
    if isinstance(item, set | frozenset):
        return sorted(map(str, item))
    if isinstance(item, list | tuple):
        return [state_of(value, seen) for value in item]
    if isinstance(item, nn.Module) and not type(item).__module__.startswith("lit_rl"):
        return state_of(item.state_dict(), seen)
    if dataclasses.is_dataclass(item) or type(item).__module__.startswith("lit_rl"):
        seen[id(item)] = item
        return (
            {name: state_of(value, seen) for name, value in vars(item).items()} if hasattr(item, "__dict__") else item
        )
    return item if isinstance(item, int | float | str | bytes | None) else type(item).__name__


def same(before: Any, after: Any, where: str = "module") -> None:
    """Two states are equal to the bit, NaN to NaN; `where` names the place of a difference."""
    assert type(before) is type(after), where
    if isinstance(before, dict):
        assert before.keys() == after.keys(), where
        for name, value in before.items():
            same(value, after[name], f"{where}.{name}")
    elif isinstance(before, list):
        assert len(before) == len(after), where
        for i, pair in enumerate(zip(before, after)):
            same(*pair, f"{where}[{i}]")
    elif isinstance(before, Tensor):
        torch.testing.assert_close(before, after, rtol=0, atol=0, equal_nan=True, msg=where)
    else:
        assert before == after or (before != before and after != after), where
