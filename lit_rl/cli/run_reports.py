"""`lit-rl compare`, `report` and `transcripts`: the runs whose files they read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from lit_rl.cli import key_checks
from lit_rl.core.errors import ConfigError
from lit_rl.reports.compare import compare
from lit_rl.reports.run_files import nearest_run_hint
from lit_rl.reports.run_page import report
from lit_rl.reports.sweep import JOBS_FILE, write_sweep
from lit_rl.reports.transcripts import transcripts


def run_compare(words: Sequence[str]) -> int:
    """Compare the two folders.

    Raises:
        ConfigError: there are not two, one is no folder, or something else is typed.
    """
    first, second = folders_of(words)
    for folder in (first, second):
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is no folder: give the folders of two runs, such as runs/a runs/b.{nearest_run_hint(folder)}"
            )
    return compare(first, second)


def folders_of(words: Sequence[str]) -> tuple[Path, Path]:
    """Return the two typed folders, whether or not they exist.

    Raises:
        ConfigError: there are not two, or something else is typed.
    """
    if len(words) != 2 or any("=" in word or word.startswith("-") for word in words):
        raise ConfigError(
            f"lit-rl compare takes the folders of two runs, and got {' '.join(words) or 'none'}. Type: lit-rl compare "
            "runs/a runs/b"
        )
    first, second = (Path(word).expanduser() for word in words)
    return first, second


REPORT_KEYS = ("run_dir",)
"""Keys that may be typed."""


def run_report(config: DictConfig) -> int:
    """Find the folder, and write its page."""
    key_checks.check_command_keys("lit-rl report", key_checks.overridden_keys(), REPORT_KEYS)
    folder = Path(str(config.run_dir)).expanduser()
    return write_sweep(folder) if (folder / JOBS_FILE).is_file() else report(folder)


TRANSCRIPT_KEYS = ("run_dir", "transcripts.files", "transcripts.rollouts", "transcripts.episodes", "transcripts.tokens")
"""Keys that may be typed."""


def run_transcripts(config: DictConfig) -> int:
    """Find the folder, and write its page."""
    key_checks.check_command_keys("lit-rl transcripts", key_checks.overridden_keys(), TRANSCRIPT_KEYS)
    return transcripts(Path(str(config.run_dir)).expanduser(), **config.transcripts)
