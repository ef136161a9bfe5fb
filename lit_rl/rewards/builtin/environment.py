"""The reward that an environment gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def environment(episodes: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return the reward by each episode's environment: its ``get_reward()``, else the sum over its turns, else None.

    Args:
        episodes: The fields of `lit_rl.episodes.Episode`. They are there where something answers the policy (``env=``).
    """
    return [episode["reward"] for episode in episodes]


def environment_turns(episodes: Sequence[Mapping[str, Any]]) -> list[float | list[tuple[int, float]] | None]:
    """Return the environment's reward with each turn credited by its own: ``(turn, value)`` for each.

    The difference between ``get_reward()`` and the sum over turns is credited to the last turn: both functions give
    every episode the same total. Estimators that read rewards of tokens credit
    turns separately (``algo/advantage=centered_return_to_go``, PPO's ``gae``); others see the sum.
    """
    return [_turns(episode) for episode in episodes]


def _turns(episode: Mapping[str, Any]) -> float | list[tuple[int, float]] | None:
    given = {turn: value for turn, value in enumerate(episode["turn_rewards"]) if value is not None}
    if not given:
        return episode["reward"]
    if rest := episode["reward"] - sum(given.values()):
        last = episode["turns"] - 1
        given[last] = given.get(last, 0.0) + rest
    return sorted(given.items())
