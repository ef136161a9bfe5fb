"""A reward that notes its calls, and sends a process a signal at one of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def signals(completions: list[str], **columns: object) -> list[float]:
    """Longer is better. `CALLS` is the file of notes, a line a call; at call `SIGNAL_AT` (from 1) the process
    `SIGNALLED` is told to end."""
    notes = Path(os.environ["CALLS"])
    with notes.open("a") as file:
        file.write(f"{len(completions)}\n")
    if len(notes.read_text().split()) == int(os.environ["SIGNAL_AT"]):
        os.kill(int(os.environ["SIGNALLED"]), signal.SIGTERM)
    return [float(len(each)) for each in completions]
