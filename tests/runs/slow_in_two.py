"""A judge and a reward that stand still for two minutes where `STANDS` names a file: each rank that does so leaves the
number of its process in one of that name with its own number behind it."""

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
    """One for half of the prompts, so that new groups are drawn for them. It stands still for those, and in a
    validation."""
    if trainer_state.step >= 2 and len(completions) < WHOLE:
        _stand()
    return [1.0 if len(asked) % 2 else float(len(each)) for asked, each in zip(prompts, completions)]


def _stand() -> None:
    if "STANDS" in os.environ:
        file = Path(f"{os.environ['STANDS']}_{os.environ.get('LOCAL_RANK', '0')}")
        file.with_suffix(".new").write_text(f"{os.getpid()}")
        file.with_suffix(".new").replace(file)
        time.sleep(120)
