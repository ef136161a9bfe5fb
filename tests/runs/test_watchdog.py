"""Where a rank stands is read from its stack: whether it waits for others, and whether for ranks alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import lightning
import pytest
import torch
import warm

import lit_rl
from lit_rl.callbacks.watchdog import may_wait_for_others_than_ranks, waits_for_ranks

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
        ((OURS / "algorithms" / "data_parallel.py",), True, False),
        ((OURS / "generation" / "vllm" / "transports.py", COLLECTIVE), True, True),
        ((OURS / "rewards" / "classifiers.py", COLLECTIVE), True, True),
        ((OURS / "environments" / "environment_worker.py", LIGHTNING, COLLECTIVE), True, True),
        ((LIGHTNING, TORCH / "distributed" / "checkpoint" / "filesystem.py"), True, True),
        ((COLLECTIVE, OURS / "callbacks" / "checkpoint_io.py", TORCH / "serialization.py"), False, False),
    ],
    ids=["a collective", "of Ranks", "weights to a server", "a reward", "an environment", "a disk", "what computes"],
)
def test_whom_a_rank_waits_for(files: tuple[Path, ...], waits: bool, for_more: bool) -> None:
    """All ranks are told to wait for each other only where none of them waits for more."""
    frames = stack(*files)
    assert (waits_for_ranks(frames), may_wait_for_others_than_ranks(frames)) == (waits, for_more)


def test_a_backward_pass_may_wait_for_more_than_ranks() -> None:
    """It waits for gradients of the others, and may as well compute, or page from a disk."""
    seen: list[FrameType] = []

    def hook(gradient: torch.Tensor) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            seen.append(frame)
            frame = frame.f_back

    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(hook)
    (2 * weight).sum().backward()
    assert waits_for_ranks(seen) and may_wait_for_others_than_ranks(seen)


WAITS = """
import sys
from types import SimpleNamespace
import torch
from lit_rl.callbacks.watchdog import _Watch

trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=0, strategy=SimpleNamespace(launcher=None))
watch = _Watch(trainer, torch.distributed.HashStore(), limit=4.0, all_wait=4.0)
names = {}
exec(compile("def wait(read):\\n    return read()", torch.__path__[0] + "/distributed/collectives.py", "exec"), names)
print("waits", flush=True)
names["wait"](sys.stdin.readline)
print(watch.end_reason, flush=True)
"""


@pytest.mark.faults
@pytest.mark.all
@pytest.mark.parametrize("stopped", [True, False])
def test_time_in_which_a_process_was_stopped_is_no_waiting(stopped: bool) -> None:
    """Six seconds of Ctrl-Z, and as many in which it really waits."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with warm.Popen([sys.executable, "-c", WAITS], **pipes) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "waits\n"
        time.sleep(0.5)
        if stopped:
            process.send_signal(signal.SIGSTOP)
        time.sleep(6.0)
        if stopped:
            process.send_signal(signal.SIGCONT)
            time.sleep(1.0)
        process.stdin.write("\n")
        process.stdin.flush()
        said = process.stdout.read()
    assert (said == "None\n") == stopped, said
