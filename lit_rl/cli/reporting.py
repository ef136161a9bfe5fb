"""`lit-rl report`: of which run, or sweep."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from lit_rl.cli import own_keys
from lit_rl.commands import sweep_report
from lit_rl.commands.run_report import report
from lit_rl.commands.sweep import JOBS

KEYS = ("run_dir",)
"""Keys that may be typed."""


def run(config: DictConfig) -> int:
    """Find the folder, and write its page."""
    own_keys.check("lit-rl report", own_keys.typed(), KEYS)
    folder = Path(str(config.run_dir)).expanduser()
    return sweep_report.write(folder) if (folder / JOBS).is_file() else report(folder)
