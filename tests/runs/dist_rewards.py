"""A reward and a judge of short runs. Worker processes import this file for every run: it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _worth(text: str) -> int:
    return sum(text.encode()) % 5


def varied(completions: list[str], log_metric: Callable[[str, float], None]) -> list[float]:
    """Differs within most groups. What it logs, it logs under names that not every rank sees."""
    for text in completions:
        log_metric(f"first/{ord(text[:1] or '-')}", len(text))
    return [float(_worth(text)) for text in completions]


def with_ties_and_failures(prompts: list[Any], firsts: list[str], seconds: list[str]) -> list[float | None]:
    """Of some prompts no verdict, of some a tie: ranks learn from other numbers of pairs."""
    verdicts: list[float | None] = []
    for prompt, first, second in zip(prompts, firsts, seconds, strict=True):
        kind, better = _worth(str(prompt)), _worth(first) - _worth(second)
        verdicts.append(None if kind == 0 else 0.5 if kind == 1 or not better else 0.9 if better > 0 else 0.2)
    return verdicts
