"""The reward that an environment gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def environment(episodes: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """What each episode's environment gave: its ``get_reward()``, else the sum over its turns; None where it gave none.

    Args:
        episodes: The fields of `lit_rl.episodes.Episode`. They are there where something answers the policy (``env=``).
    """
    return [episode["reward"] for episode in episodes]
