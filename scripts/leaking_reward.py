"""A reward that keeps 4 MiB of each call, for `scripts/soak.py`: its worker process is renewed before that is much."""

from __future__ import annotations

from collections.abc import Sequence

_KEPT: list[bytearray] = []


def leaking(completions: Sequence[str]) -> list[float]:
    """The length of each completion, in characters."""
    _KEPT.append(bytearray(b"x" * 2**22))
    return [float(len(completion)) for completion in completions]
