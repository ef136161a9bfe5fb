"""What the tests of the command line share besides fixtures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUICK = [
    "trainer.accelerator=cpu",
    "trainer.devices=1",
    "trainer.max_steps=1",
    "trainer.max_time=00:00:01:00",
    "trainer.limit_val_batches=1",
    "algo.group_size=2",
    "sampling.max_new_tokens=6",
    "data.prompts_per_rollout=2",
    "logger=none",
]
"""One optimizer step of four completions, validated on one batch."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


def refused(outcome: Outcome, code: int, *words: str) -> None:
    """The exit code, every word in the message, and no traceback."""
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err, f"{word!r} is not in: {outcome.err}"


def contents(folder: Path) -> list[str]:
    """Everything below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def metrics(run_dir: Path) -> dict[str, Any]:
    """The last value of everything that a run logged."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {key: value for row in rows for key, value in row.items()}
