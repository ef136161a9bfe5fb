"""Where the time of one step goes: kernels by time, how long the card idles, launches a token, waits by line.

The main command's work with 16 tokens in place of 512, as a profile of them all takes minutes to read (some 3,000
events a token, 30 us each): decoding is the same from token to token. One step is profiled, another is watched for
synchronisations, which slows it down.
"""

from __future__ import annotations

import collections
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench.phases import Phases
from torch._C._autograd import DeviceType

from gpu import training
from gpu.main_command import G1
from gpu.result import SMALL, Result, stage
from gpu.training import GPU, PRETENDED, Clock

WORK = G1 if SMALL else replace(G1, completion_tokens=16)
PROFILED, WATCHED, STEPS = 3, 4, 5
"""By number, from 1: those before them warm up."""
REAL = GPU and not PRETENDED
KERNELS, LINES = 15, 15
"""That are told, the costliest first."""


class Watch(Clock):
    """Profiles one step and watches another."""

    def __init__(self) -> None:
        super().__init__()
        self.profile: Any = None
        self.waits: collections.Counter[str] = collections.Counter()
        self.phases = _Marked(training.wait)
        self.phases.exact = True

    def between(self) -> None:
        super().between()
        step = len(self.seconds) + 1
        if not REAL:
            return
        if step == PROFILED:
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profile = torch.profiler.profile(activities=activities).__enter__()
        elif step == PROFILED + 1:
            self.profile.__exit__(None, None, None)
        if step == WATCHED:
            warnings.simplefilter("always")
            warnings.showwarning = self._told
            torch.cuda.set_sync_debug_mode("warn")
        elif step == WATCHED + 1:
            torch.cuda.set_sync_debug_mode("default")

    def _told(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """A warning: the innermost frame of lit_rl waited, or where there is none, the innermost."""
        if "synchroniz" in str(message):
            frames = [frame for frame in traceback.extract_stack()[:-1] if "/warnings.py" not in frame.filename]
            frame = next((each for each in reversed(frames) if "/lit_rl/" in each.filename), frames[-1])
            self.waits[f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"] += 1


class _Marked(Phases):
    """Phases that the profile shows by name."""

    def timed(self, name: str, function: Any) -> Any:
        timed = super().timed(name, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(f"phase: {name}"):
                return timed(*args, **kwargs)

        return call


def run(result: Result, work: Path) -> None:
    if not REAL:
        result.not_run("kernels, gaps, launches and waits", "a profile of a card needs one; the step itself is run")
    watch = Watch()
    spec = training.prepared(WORK, work / WORK.shape, "trace")
    training.ours(spec, "trainer.precision=auto", steps=STEPS, clock=watch)
    result.figure("a step, not profiled", watch.seconds[PROFILED - 2], "s", f"{WORK.completion_tokens} tokens")
    result.figure("the step that is profiled", watch.seconds[PROFILED - 1], "s")
    if REAL:
        told(result, watch)


def told(result: Result, watch: Watch) -> None:
    """What the profile and the warnings say."""
    events = watch.profile.events()
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    kernels = [event for event in kernels if not event.name.startswith("phase: ")]
    busy = covered([(event.time_range.start, event.time_range.end) for event in kernels])
    first = min(event.time_range.start for event in kernels)
    span = max(event.time_range.end for event in kernels) - first
    result.figure("the card idles in a profiled step", 1 - busy / span, note="share of the time between its kernels")
    launches = [event for event in events if event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel"))]
    host = (event for event in events if event.device_type != DeviceType.CUDA)
    drawing = [event.time_range for event in host if event.name == "phase: generate"]
    inside = sum(any(each.start <= launch.time_range.start <= each.end for each in drawing) for launch in launches)
    result.figure("launches in a step", len(launches))
    result.figure("launches a token", inside / WORK.completion_tokens, note="all rows together, the prompts' included")
    by_name: collections.Counter[str] = collections.Counter()
    for event in kernels:
        by_name[event.name] += event.time_range.elapsed_us()
    for name, took in by_name.most_common(KERNELS):
        result.figure(f"kernel {name[:90]}", took / 1e6, "s", f"{took / span:.1%} of the step")
    result.figure("waits for the card in a step", sum(watch.waits.values()), note="by torch.cuda.set_sync_debug_mode")
    for line, count in watch.waits.most_common(LINES):
        result.figure(f"wait {line}", count)


def covered(spans: list[tuple[float, float]]) -> float:
    """The length that spans cover together, where they overlap once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


if __name__ == "__main__":
    stage(run)
