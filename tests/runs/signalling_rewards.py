"""A reward that notes its calls, and sends a process a signal at one of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def signals(completions: list[str], **columns: object) -> list[float]:
    """Longer is better. `CALLS` is the file of notes, a line a call; at call `SIGNAL_AT` (from 1) the process
    `SIGNALLED` is told to end, and the function catches everything and goes on for two minutes."""
    notes = Path(os.environ["CALLS"])
    with notes.open("a") as file:
        file.write(f"{len(completions)}\n")
    if len(notes.read_text().split()) == int(os.environ["SIGNAL_AT"]):
        until = time.monotonic() + 120
        try:
            say_when_and_send(int(os.environ["SIGNALLED"]))
            time.sleep(60)
        except:  # noqa: E722
            time.sleep(until - time.monotonic())
    return [float(len(each)) for each in completions]


def say_when_and_send(process: int) -> None:
    """`SIGNAL`, or SIGTERM; the time stands in the file `SENT`."""
    Path(os.environ["SENT"]).write_text(str(time.time()))
    os.kill(process, signal.Signals[os.environ.get("SIGNAL", "SIGTERM")])
