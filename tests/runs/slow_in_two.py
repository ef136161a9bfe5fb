"""A judge and a reward that stand still for two minutes where `STANDS` names a file that they may write."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

WHOLE = 8
"""Completions of one rank in a rollout; of groups that are drawn beside it there are fewer."""


def judge(prompts: list[str], firsts: list[str], seconds: list[str], trainer_state: Any, **columns: Any) -> list[float]:
    if trainer_state.step >= 2:
        _stand()
    return [float(len(a) > len(b)) if len(a) != len(b) else 0.5 for a, b in zip(firsts, seconds)]


def reward(prompts: list[str], completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
    """One for half of the prompts, so that new groups are drawn for them."""
    if trainer_state.step >= 2 and len(completions) < WHOLE:
        _stand()
    return [1.0 if len(asked) % 2 else float(len(each)) for asked, each in zip(prompts, completions)]


def _stand() -> None:
    if "STANDS" in os.environ:
        Path(os.environ["STANDS"]).touch()
        time.sleep(120)
