"""A logger to metrics.jsonl: one line for each rollout and validation, appended, never rewritten."""

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
    """A logger of metrics as JSON lines `{"step": ..., name: value, ...}`.

    Lines that cannot be written wait in memory for the next call; the file never ends within a line.

    Args:
        path: The file to append to, which a resumed run continues. None, for `lit-rl fit` only: `metrics.jsonl` in the
            folder of the Trainer's first logger.
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
        """Append the waiting lines.

        Raises:
            OSError: the file cannot be written. It is unchanged.
            ConfigError: there is no path.
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
        """Do nothing: config.yaml holds them."""


def _plain(value: Any) -> float | int | None:
    """Return a number for JSON, with null for NaN and infinity."""
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if isinstance(value, int) else number
