"""What configs of tests name: a tool, and a function that makes rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def double(a: int) -> int:
    """Double a number.

    Args:
        a: The number.
    """
    return 2 * a


def rollout(prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
    """One turn."""
    return trainer.generate([trainer.encode(prompt) for prompt in prompts])
