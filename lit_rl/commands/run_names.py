"""The names in a run's folder, without what writes there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = "report.html"
"""File name of the page that `lit-rl report` writes, and a run at each of its ends."""


@dataclass(frozen=True)
class RunNames:
    """A run's folder and the paths in it."""

    path: Path

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def error(self) -> Path:
        return self.path / "error.json"

    @property
    def page(self) -> Path:
        return self.path / PAGE

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"
