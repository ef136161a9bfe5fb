"""metrics.jsonl: one line a rollout and one a validation, appended, never rewritten."""

from __future__ import annotations

import contextlib
import json
import math
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from lit_rl.errors import ConfigError


class JsonlLogger(Logger):
    """Writes every metric that is logged as JSON lines `{"step": ..., name: value, ...}`.

    Lines that cannot be written wait in memory for the next call; the file never ends within one.

    Args:
        path: The file. It is appended to, so a resumed run goes on in it. None, for `lit-rl fit` alone: `metrics.jsonl`
            in the folder of the Trainer's first logger.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        self.path = None if path is None else Path(path)
        self._waiting: list[str] = []

    @property
    def name(self) -> str:
        return "jsonl"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {"step": step, **{name: _plain(value) for name, value in metrics.items()}}
        self._waiting.append(json.dumps(row) + "\n")
        self.save()

    @rank_zero_only
    def save(self) -> None:
        """Append what waits.

        Raises:
            OSError: the file cannot be written. It is as it was.
            ConfigError: nobody has said which file.
        """
        if not self._waiting:
            return
        if self.path is None:
            raise ConfigError("JsonlLogger(path=None) is for lit-rl fit: give the file, such as runs/x/metrics.jsonl.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.write("".join(self._waiting))
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, before)
            raise
        self._waiting.clear()

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml holds them."""


def _plain(value: Any) -> float | int | None:
    """A number as JSON has it; NaN and infinity, which it has not, as null."""
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if isinstance(value, int) else number
