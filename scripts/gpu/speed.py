"""The time of one step, and where it goes: kernels by time, how long the card idles, launches a token, waits by line.

The main command's work with 16 tokens in place of 512, as a profile of them all takes minutes to read (some 3,000
events a token, 30 us each): decoding is the same from token to token. One step is profiled, another is watched for
synchronisations, which slows it down. By arithmetic: a start of 15 s, five steps of 1 to 3 s, and 100,000 events that
are read in 3 to 10 s.
"""

from __future__ import annotations

import collections
import os
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench.phases import Phases
from torch._C._autograd import DeviceType

import lit_rl
from gpu import training
from gpu.main_command import G1
from gpu.result import SMALL, Result, stage
from gpu.training import REAL, Clock

WORK = G1 if SMALL else replace(G1, completion_tokens=16)
PLAIN, PROFILED, WATCHED = 3, 4, 5
"""By number, from 1. The first is given its completions, the second warms up what draws them."""
ANNOTATIONS = "phase: ", "Optimizer.", "ProfilerStep"
"""Beginnings of names of spans that are no kernels, though the profile shows them on the card."""
PACKAGE, HARNESS = str(Path(lit_rl.__file__).parent), str(Path(__file__).parents[1])
KERNELS, LINES = 15, 15
"""That are told, the costliest first."""


class Watch(Clock):
    """Profiles one step and watches another; tells what steps took before a profile is read."""

    def __init__(self, result: Result) -> None:
        super().__init__()
        self._result = result
        self.profile: Any = None
        self.waits: collections.Counter[str] = collections.Counter()
        self.phases = _Marked(training.wait)
        self.phases.exact = True

    def between(self) -> None:
        super().between()
        step = len(self.seconds) + 1
        if step == PLAIN + 1:
            self._result.figure("a step, not profiled", self.seconds[-1], "s", f"{WORK.completion_tokens} tokens")
        elif step == PROFILED + 1:
            self._result.figure("the step that is profiled", self.seconds[-1], "s")
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
        if "synchroniz" in str(message):
            self.waits[waiting(traceback.extract_stack()[:-1])] += 1


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
    watch = Watch(result)
    spec = training.prepared(WORK, work / WORK.shape, "trace", unrecorded=True)
    training.ours(spec, "trainer.precision=auto", steps=WATCHED, clock=watch)
    if REAL:
        waits_told(result, watch.waits)
        told(result, watch.profile.events())


def waiting(frames: Sequence[traceback.FrameSummary]) -> str:
    """The line that waited: the innermost of lit_rl, or of this harness, which is said; the innermost where neither is.

    Args:
        frames: Of the call, the innermost last.
    """
    known = [each for each in frames if each.filename.startswith((PACKAGE + os.sep, HARNESS + os.sep))]
    inner = [each for each in known if Path(each.filename).name != Path(__file__).name]
    frame = (inner or list(frames))[-1]
    whose = "the harness, " if frame.filename.startswith(HARNESS + os.sep) else ""
    return f"{whose}{Path(frame.filename).name}:{frame.lineno} {frame.name}"


def waits_told(result: Result, waits: collections.Counter[str]) -> None:
    """Waits of lit_rl first, by line."""
    ours = sum(count for line, count in waits.items() if not line.startswith("the harness"))
    result.figure("waits for the card in a step", ours, note="by torch.cuda.set_sync_debug_mode, without the harness's")
    for line, count in waits.most_common(LINES):
        result.figure(f"wait {line}", count)


def told(result: Result, events: Sequence[Any]) -> None:
    """Add what the profile says."""
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    kernels = [event for event in kernels if not getattr(event, "is_user_annotation", False)]
    kernels = [event for event in kernels if not event.name.startswith(ANNOTATIONS)]
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


def covered(spans: list[tuple[float, float]]) -> float:
    """The length that spans cover together, where they overlap once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


if __name__ == "__main__":
    stage(run)
