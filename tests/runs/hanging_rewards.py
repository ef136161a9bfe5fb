"""A reward that never returns at its third call, on the rank that `HANGS_ON_RANK` names."""

from __future__ import annotations

import os
import time

calls = 0


def hangs(completions: list[str]) -> list[float]:
    global calls
    calls += 1
    if calls == 3 and os.environ.get("LOCAL_RANK", "0") == os.environ["HANGS_ON_RANK"]:
        never_returns()
    return [float(len(text) % 2) for text in completions]


def never_returns() -> None:
    while True:
        time.sleep(0.2)
