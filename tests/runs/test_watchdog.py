"""Where a rank stands is read from its stack: whether it waits for others, and whether for ranks alone."""

from __future__ import annotations

from pathlib import Path
from types import FrameType

import lightning
import pytest
import torch

import lit_rl
from lit_rl.callbacks.watchdog import may_wait_for_more, waits_for_others

TORCH, OURS = Path(torch.__file__).parent, Path(lit_rl.__file__).parent
LIGHTNING = Path(lightning.__file__).parent / "fabric" / "utilities" / "distributed.py"
COLLECTIVE = TORCH / "distributed" / "distributed_c10d.py"
SOURCE = """
def call(rest):
    if rest:
        return rest[0](rest[1:])
    import sys
    frame, frames = sys._getframe(), []
    while frame:
        frames.append(frame)
        frame = frame.f_back
    return frames
"""


def stack(*files: Path) -> list[FrameType]:
    """Of functions in these files, each called by the one before; the innermost first."""
    calls = []
    for file in files:
        names: dict = {}
        exec(compile(SOURCE, str(file), "exec"), names)
        calls.append(names["call"])
    return calls[0](calls[1:])


@pytest.mark.parametrize(
    ("files", "waits", "for_more"),
    [
        ((OURS / "algorithms" / "loop" / "module.py", LIGHTNING, COLLECTIVE), True, False),
        ((OURS / "algorithms" / "ranks.py",), True, False),
        ((OURS / "generation" / "vllm" / "transports.py", COLLECTIVE), True, True),
        ((OURS / "rewards" / "scorers" / "spread.py", COLLECTIVE), True, True),
        ((OURS / "environments" / "worker.py", LIGHTNING, COLLECTIVE), True, True),
        ((LIGHTNING, TORCH / "distributed" / "checkpoint" / "filesystem.py"), True, True),
        ((COLLECTIVE, OURS / "callbacks" / "checkpoint_io.py", TORCH / "serialization.py"), False, False),
    ],
    ids=["a collective", "of Ranks", "weights to a server", "a reward", "an environment", "a disk", "what computes"],
)
def test_whom_a_rank_waits_for(files: tuple[Path, ...], waits: bool, for_more: bool) -> None:
    """All ranks are told to wait for each other only where none of them waits for more."""
    frames = stack(*files)
    assert (waits_for_others(frames), may_wait_for_more(frames)) == (waits, for_more)
