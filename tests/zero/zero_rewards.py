"""Rewards that differ within a group, whatever the shipped policy writes."""

from __future__ import annotations

from typing import Any


def odd(completions: list[str]) -> list[float]:
    return [float(sum(map(ord, text)) % 2) for text in completions]


def not_in_the_second_rollout(completions: list[str], trainer_state: Any) -> list[float | None]:
    """None is no reward: of a rollout without any nothing is learned."""
    return [None if trainer_state.step == 1 else value for value in odd(completions)]
