"""Rewards that were worked out before, by what the function saw."""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any


class Cache:
    """An LRU cache of one function's results by its inputs.

    Args:
        size: Entries that are kept.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._entries: OrderedDict[bytes, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Any:
        """Return the entry, or None."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: bytes, entry: Any) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        if len(self._entries) > self.size:
            self._entries.popitem(last=False)


def key_of(inputs: Mapping[str, Any]) -> bytes:
    """Return a digest of one completion's inputs: equal for equal texts, numbers, lists and dicts; types count."""
    return hashlib.blake2b(repr(_frozen(dict(inputs))).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _frozen(value: Any) -> Any:
    """Return the value as nested tuples of texts and numbers, whose repr determines it."""
    if value is None or type(value) in (str, int, float, bool, bytes):
        return value
    if isinstance(value, dict):
        return (
            "dict",
            *sorted(((repr(_frozen(key)), _frozen(item)) for key, item in value.items()), key=lambda p: p[0]),
        )
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_frozen(item) for item in value))
    return (type(value).__name__, pickle.dumps(value))
