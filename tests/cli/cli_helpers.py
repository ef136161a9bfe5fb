"""What the tests of the command line share besides fixtures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_rl.core.durable_files import PARTIAL

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
    """How a command ended, what it said, and which files and folders below the current one it wrote or removed."""

    code: int
    out: str
    err: str
    touched: tuple[str, ...] = ()


Command = Callable[..., Outcome]


def refused(outcome: Outcome, code: int, *words: str, keeps: str | None = None) -> None:
    """The exit code, every word in the message, no traceback, and a disk that is as it was.

    Args:
        outcome: Of the command.
        code: That it ends with.
        words: Of its message.
        keeps: A folder in which something was learned, so that it stays; without half-written files.
    """
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err, f"{word!r} is not in: {outcome.err}"
    left = [name for name in outcome.touched if keeps is None or name.partition("/")[0] != keeps or PARTIAL in name]
    assert left == [], f"written, changed or removed: {left}"


def looked_at(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder, with what changes where a file is written: its size and time."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[str(path.relative_to(folder))] = (-1, -1) if path.is_dir() else (status.st_size, status.st_mtime_ns)
    return found


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
