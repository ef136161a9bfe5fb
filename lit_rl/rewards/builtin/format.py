"""Rewards for the shape of a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_rl.rewards.completion import Completion, text_of

_OPEN, _CLOSE = "<think>", "</think>"


def reasoning_format(prompts: Sequence[Any], completions: Sequence[Completion], **_: Any) -> list[float]:
    """Return 1 where the completion starts with ``<think>``, opens no second one and closes it; else 0.

    The reply after ``</think>`` may be anything, nothing included. For an ``<answer>`` block too, take `RegexFormat`.
    """
    return [float(_opens_once_and_closes(text_of(completion))) for completion in completions]


def _opens_once_and_closes(text: str) -> bool:
    return text.startswith(_OPEN) and _OPEN not in text[len(_OPEN) :] and _CLOSE in text
