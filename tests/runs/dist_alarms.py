"""A run of two processes that an alarm takes back."""

from __future__ import annotations

from pathlib import Path

from alarm_runs import AtLooks, fitted


def main(folder: Path) -> None:
    """Wrong at the ends of rollouts 2 and 3, of two optimizer steps each: back to step 3 after step 6."""
    fitted(folder, AtLooks({2, 3}, then="roll_back", patience=2), steps=4, strategy="ddp", devices=2)
