"""The card, and the speed of whole steps on it: the stages `machine`, `main_command`, `trl`, `figures` and
`step_trace`.

**machine**: name, driver, versions, commit; the rate of matrix products and of copies, measured.

**main_command**: seconds by phase, tokens a second, MFU, peak memory against the plan, share of the limits.
Qwen2.5-0.5B's shape, 32 prompts of 128 tokens x 8 completions of 512, `train.py`'s defaults. By arithmetic, on a card
of 800 TFLOP/s: a step has 4.7e14 useful FLOPs of learning, 0.6 s at the limit and 2 to 6 s at 10 to 30 % of it; 512
tokens of decoding at 5 to 10 ms a token of 24 layers, whose launches cost more than their bytes, 3 to 5 s. Seven steps
of 5 to 11 s and a start of 12 s are 47 to 89 s. Where the box of 120 s has time left, five steps follow with
`generator.speedups.cuda_graphs=true`, 40 s at 5 s a step, and with `model.compile=true`, 65 s with Triton.

**trl**: TRL 1.16 on the main command's work, without vLLM: a setting for one card, and as it comes. The setting is what
its documentation has for one card: weights in bfloat16, no recomputation where memory allows, and 32 rows a forward
pass (of 640 tokens: 20 GB of logits; 16 where that does not fit). By arithmetic: 512 tokens of `generate` at 25 to 30
ms, 15 s, and 5 to 8 s of learning are 20 to 25 s a step, of which two are timed after one on given completions: 45 to
60 s, and 12 s for the start. As it comes (8 rows a pass, recomputation) a step is 30 s, one is timed after one on given
completions, and 3 s go to the start: 45 s, where the box of 110 s has them left.

**figures** that others publish of one H100, from the same shapes with random weights: tokens a second and memory.
prime-rl (its benchmarks/results): SFT and the learning of RL with Qwen3-0.6B's shape, all weights, bfloat16,
recomputation, with FlashAttention 3 and torch.compile. TRL 1.15 (its release notes): peak memory with Gemma-3-1B's
shape, 8,192 tokens, batch 1 (KTO 2), recomputation, sdpa, with its chunked head, on a card of 79 GiB. Our smallest
steps of GRPO, RLOO and KTO have more rows than theirs, as their names say. RL with one sequence of 16,384 tokens is
learned by REINFORCE, whose group may be of one; nothing but the arithmetic of a reward sets it apart. By arithmetic:
16,384 tokens of 0.6B are 8e13 FLOPs with recomputation and as many of attention, 0.4 s at half of an H100's rate; 8,192
of 1B 6e13, 0.15 s. So a row is its start, 5 to 7 s with reading 1.2 or 2 GB of weights in bfloat16. Seven rows are 35
to 50 s, imports and drawing two models 10 s: the last may be left out in a box of 60 s.

**step_trace**: the time of one step, and where it goes: kernels by time, how long the card idles, launches a token,
waits by line. The main command's work with 16 tokens in place of 512, as a profile of them all takes minutes to read
(some 3,000 events a token, 30 us each): decoding is the same from token to token. One step is profiled, another is
watched for synchronisations, which slows it down. By arithmetic: a start of 15 s, five steps of 1 to 3 s, and 100,000
events that are read in 3 to 10 s.
"""

from __future__ import annotations

import collections
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from bench.bounds import Work, measure_machine, revision
from bench.protocol import Phases
from bench.workload import Workload
from torch._C._autograd import DeviceType

import lit_rl
from gpu import training
from gpu.prove import SMALL, Result, stage
from gpu.training import GIB, GPU, REAL, Clock, Trained

# ------------------------------------------------------------------------------------------------------------- machine


PACKAGES = ("torch", "triton", "transformers", "lightning", "peft", "accelerate", "trl", "liger-kernel", "datasets")
PACKAGES += ("huggingface-hub", "pyarrow", "numpy", "hydra-core")


def machine(result: Result, work: Path) -> None:
    device = "cuda" if GPU else "cpu"
    result.figure("card", torch.cuda.get_device_name() if GPU else "none: a CPU")
    result.figure("driver", driver())
    result.figure("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    commit = os.environ.get("PROOF_COMMIT") or revision()["commit"]
    result.figure("commit", f"{commit or 'unknown'}{'+' if revision()['changed'] else ''}")
    result.figure("Python", platform.python_version())
    for name in PACKAGES:
        try:
            result.figure(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            result.figure(name, "not installed")
    if GPU:
        result.figure("memory", torch.cuda.get_device_properties(0).total_memory / GIB, "GiB")
    with result.part("limits"):  # the matrices of which the data sheets of cards are told: 8192 x 8192
        rates = measure_machine(device, size=256, floats=2**20) if SMALL else measure_machine(device, 8192, 2**29)
        for dtype, rate in rates.flops.items():
            result.figure(f"matrix rate, {dtype}", rate / 1e12, "TFLOP/s")
        result.figure("copy rate", rates.copy / 1e9, "GB/s", "bytes read and written")
        result.figure("read rate", rates.read / 1e9, "GB/s")


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return "unknown"


# -------------------------------------------------------------------------------------------------------- main_command


G1 = Workload("G1", shape="0.5b", prompts=32, group=8, prompt_tokens=128, completion_tokens=512)
if SMALL:
    G1 = replace(G1, shape="tiny", prompts=2, group=4, prompt_tokens=8, completion_tokens=16)
WARMUPS, STEPS = 2, 4 if SMALL else 7
"""The first step's completions are given; the second warms up what draws them."""
AGAIN = 5
"""Steps with a switch, of which three are timed."""
SWITCHES = {"CUDA graphs": ("generator.speedups.cuda_graphs=true", 15), "compiled": ("model.compile=true", 40)}
"""What is run again, and the seconds that are no step's: the start, and Triton."""
AS_PLANNED = 0.15
"""Of the plan, that the peak may be above or below it."""


def main_command(result: Result, work: Path) -> None:
    spec = training.prepared(G1, work / G1.shape, "main")
    trained = training.ours(spec, "trainer.precision=auto", steps=STEPS, warmups=WARMUPS)
    rates = limits(result)
    seconds(result, "lit_rl", trained, rates)
    result.figure("lit_rl: decode steps", trained.decoded or "unknown", note="NativeGenerator.steps")
    passes = f"{sum(trained.shared)} of {len(trained.shared)}"
    result.figure("lit_rl: training passes that compute a prompt once", passes)
    for key, said in trained.trials.items():
        result.figure(f"lit_rl: trial of {key}", "not taken" if said else "taken", note=said)
    if trained.planned and trained.peak:
        result.figure("lit_rl: the plan", trained.planned / GIB, "GiB")
        share = trained.peak / trained.planned
        result.check("lit_rl: peak over the plan", share, least=1 - AS_PLANNED, most=1 + AS_PLANNED)
    if rates:
        bound = Work.of(G1, WARMUPS).bound(*rates)
        parts = {"decode": ("generate", bound.prefill + bound.decode), "learning": ("train", bound.train)}
        parts["optimizer"] = ("optimize", bound.optimizer)
        for name, (phase, least) in parts.items():
            took = max(trained.phases[phase], 1e-9)
            result.figure(f"lit_rl: share of the limit, {name}", least / took, note=f"the limit is {least:.3g} s")
        result.figure("lit_rl: share of the limit, step", bound.step / trained.seconds, note="bench/bounds.py")
    mfu_as_trl(result, "lit_rl", trained)
    again(result, work, trained.seconds)


def again(result: Result, work: Path, step: float) -> None:
    """Run the same with a switch that is off by default, if there is time."""
    for name, (setting, more) in SWITCHES.items():
        who, needed = f"lit_rl, {name}", AGAIN * step + more
        if not REAL:
            result.not_run(who, "it needs a real card")
        elif result.left < needed:
            result.not_run(who, f"{result.left:.0f} s are left, {needed:.0f} s are needed")
        else:
            with result.part(who):
                spec = training.prepared(G1, work / G1.shape, f"main_{name.replace(' ', '_')}", unrecorded=True)
                trained = training.ours(spec, "trainer.precision=auto", setting, steps=AGAIN, warmups=WARMUPS)
                seconds(result, who, trained, limits(result))
                result.figure(f"{who}: decode steps", trained.decoded or "unknown", note="NativeGenerator.steps")


def seconds(result: Result, who: str, trained: Trained, rates: tuple[float, float] | None) -> None:
    """Add the figures by which ours and TRL's are compared."""
    work = trained.work
    result.figure(f"{who}: a step", trained.seconds, "s", f"median of {len(trained.clock.seconds) - trained.warmups}")
    for phase, took in trained.phases.items():
        result.figure(f"{who}: {phase}", took, "s")
    if work.generates and trained.phases["generate"]:
        tokens = work.rows * work.completion_tokens
        result.figure(f"{who}: generated", tokens / trained.phases["generate"], "tokens/s")
    result.figure(f"{who}: learned", trained.tokens / trained.phases["train"], "tokens/s", "prompts and completions")
    result.figure(f"{who}: step", trained.tokens / trained.seconds, "tokens/s", "prompts and completions")
    mfu(result, who, trained, rates)
    if trained.peak:
        result.figure(f"{who}: peak of tensors", trained.peak / GIB, "GiB")


def mfu(result: Result, who: str, trained: Trained, rates: tuple[float, float] | None) -> None:
    """Add the MFU of the learning alone."""
    if rates:
        note = "our formula: causal attention, head on completions; of the measured matrix rate"
        result.figure(f"{who}: MFU of learning", trained.flops / trained.phases["train"] / rates[0], note=note)


def mfu_as_trl(result: Result, who: str, trained: Trained) -> None:
    """Add the MFU by TRL's formula, whose import takes seconds and may fail: so it comes last."""
    from lit_rl.algorithms.rollouts.phase_costs import peak_of

    peak = peak_of(torch.device("cuda"), half=True) if training.GPU else None
    if peak is None:
        return
    what = f"{who}: MFU of learning, as TRL counts"
    with result.part(what):
        sheet = f"of the data sheet's {peak / 1e12:.0f} TFLOP/s (lit_rl's table of cards)"
        note = f"TRL's formula: full attention, head on every token; {sheet}"
        result.figure(what, trained.flops_as_trl() / trained.phases["train"] / peak, note=note)


def limits(result: Result) -> tuple[float, float] | None:
    """Return FLOP/s and bytes/s that `machine` measured; None where that stage was not run."""
    file = result.folder / "machine.json"
    if not file.is_file():
        return None
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    found = {row["what"]: row["value"] for row in rows}
    flops = [value for what, value in found.items() if what.startswith("matrix rate")]
    bytes_ = [found[what] for what in ("copy rate", "read rate") if what in found]
    return (1e12 * max(flops), 1e9 * max(bytes_)) if flops and bytes_ else None


# ----------------------------------------------------------------------------------------------------------------- trl


BEST = {"model_init_kwargs": {"dtype": "bfloat16"}, "gradient_checkpointing": False}
ROWS_A_PASS = 32, 16
DEFAULT_SECONDS = 45
"""Seconds of TRL as it comes; where fewer are left, it is left out."""
NATS = 0.1
"""Of any token of the first step, from ours: two roundings to bfloat16 of 24 layers."""


def trl(result: Result, work: Path) -> None:
    with result.part("TRL, best setting"):
        best(result, work)
    training.free()
    if result.left < DEFAULT_SECONDS:
        result.not_run("TRL, as it comes", f"{result.left:.0f} s are left")
        return
    with result.part("TRL, as it comes"):
        spec = training.prepared(G1, work / G1.shape, "trl_default", config={}, unrecorded=True)
        trained = training.trl(spec, steps=2, warmups=1)
        seconds(result, "TRL, as it comes", trained, limits(result))
        mfu_as_trl(result, "TRL, as it comes", trained)


def best(result: Result, work: Path) -> None:
    """Train with the largest forward pass that fits."""
    for rows in ROWS_A_PASS:
        size = min(rows, G1.rows)
        more = {"per_device_train_batch_size": size, "gradient_accumulation_steps": G1.rows // size}
        spec = training.prepared(G1, work / G1.shape, "trl_best", config=BEST | more)
        trained = None
        try:
            trained = training.trl(spec, steps=3, warmups=1)
        except torch.OutOfMemoryError:
            result.not_run(f"TRL, {rows} rows a pass", "out of memory")
        if trained is None:
            training.free()  # not above, where the frames of the error still hold the model
            continue
        seconds(result, "TRL, best setting", trained, limits(result))
        ours = work / G1.shape / "main"
        if (ours / "first_step.json").is_file():
            found = training.agreement(spec, ours, gradients=False)
            note = f"of {found.tokens:,} tokens"
            result.check("log-probs of the first step, from ours", found.logprobs, most=NATS, unit="nats", note=note)
        else:
            result.not_run("log-probs of the first step, from ours", "the main command left none")
        mfu_as_trl(result, "TRL, best setting", trained)
        return


# ------------------------------------------------------------------------------------------------------------- figures


SETTINGS = "trainer.precision=bf16-true", "model.gradient_checkpointing=true"
ROW_SECONDS = 8
"""Of a row, at most; where fewer are left, it is left out."""
PROMPT = 64
"""Tokens, of which nothing is learned; the published rows learn from all."""


@dataclass(frozen=True)
class Published:
    """A row of another project, and ours of the same work."""

    work: Workload
    tokens: float | None
    """A second, theirs."""
    memory: float
    """GiB, theirs."""
    whose: str
    algo: str | None = None
    """Where it is another than the work's method."""
    steps: int = 2
    """The peak is reached in the second, where optimizer state is there."""


def _work(method: str, shape: str, tokens: int, rows: int, group: int, micro_batches: int | None = None) -> Workload:
    name = f"{method} {shape} {tokens}"
    more = {"prompt_tokens": PROMPT, "completion_tokens": tokens - PROMPT, "micro_batches": micro_batches}
    return Workload(name, method, shape, prompts=rows // group, group=group, **more)  # pyright: ignore


PRIME, TRL = "prime-rl, H100", "TRL 1.15, 79 GiB"
FIGURES = {
    "SFT, 0.6B, 2 rows of 8,192": Published(_work("sft", "0.6b", 8192, 2, 1, 2), 26.0e3, 31.7, PRIME, steps=4),
    "RL learning, 0.6B, 16,384": Published(
        _work("grpo", "0.6b", 16_384, 1, 1), 11.9e3, 12.5, PRIME, algo="reinforce", steps=4
    ),
    "SFT, 1B, 8,192": Published(_work("sft", "1b", 8192, 1, 1), None, 8.87, TRL),
    "DPO, 1B, a pair of 8,192": Published(_work("dpo", "1b", 8192, 2, 2), None, 12.0, TRL),
    "GRPO, 1B, 2 rows of 8,192": Published(_work("grpo", "1b", 8192, 2, 2), None, 10.3, TRL),
    "RLOO, 1B, 2 rows of 8,192": Published(_work("grpo", "1b", 8192, 2, 2), None, 14.02, TRL, algo="rloo"),
    "KTO, 1B, 2 pairs of 8,192": Published(_work("dpo", "1b", 8192, 4, 2), None, 11.98, TRL, algo="kto"),
}


def figures(result: Result, work: Path) -> None:
    for number, (name, row) in enumerate(FIGURES.items()):
        if result.left < ROW_SECONDS:
            result.not_run(name, f"{result.left:.0f} s are left")
            continue
        with result.part(name):
            measured(result, work / row.work.shape, f"figure_{number}", name, row)


def measured(result: Result, folder: Path, place: str, name: str, row: Published) -> None:
    """Add our figures, each with theirs in its note."""
    work = replace(row.work, shape="tiny", prompt_tokens=8, completion_tokens=24) if SMALL else row.work
    told = {"learns_alone": True, "unrecorded": True} | ({"algo": row.algo} if row.algo else {})
    spec = training.prepared(work, folder.parent / work.shape, place, **told)
    data = [] if work.generates else ["data.max_length=null"]
    try:
        trained = training.ours(spec, *SETTINGS, *data, steps=row.steps, warmups=1)
    finally:
        shutil.rmtree(spec.work)  # a run that fails exports its model
    if row.tokens is not None:
        rate = trained.tokens / trained.seconds
        result.figure(f"{name}: learned", rate, "tokens/s", f"{row.whose}: {row.tokens:,.0f}")
        mfu(result, name, trained, limits(result))
    if trained.peak:
        result.figure(f"{name}: peak of tensors", trained.peak / GIB, "GiB", f"{row.whose}: {row.memory:g}")
    if row.tokens is not None:
        mfu_as_trl(result, name, trained)


# ---------------------------------------------------------------------------------------------------------- step_trace


TRACED = G1 if SMALL else replace(G1, completion_tokens=16)
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
            self._result.figure("a step, not profiled", self.seconds[-1], "s", f"{TRACED.completion_tokens} tokens")
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


def step_trace(result: Result, work: Path) -> None:
    if not REAL:
        result.not_run("kernels, gaps, launches and waits", "a profile of a card needs one; the step itself is run")
    watch = Watch(result)
    spec = training.prepared(TRACED, work / TRACED.shape, "trace", unrecorded=True)
    training.ours(spec, "trainer.precision=auto", steps=WATCHED, clock=watch)
    if REAL:
        waits_told(result, watch.waits)
        profile_told(result, watch.profile.events())


def waiting(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the line that waited: the innermost of lit_rl, or of this harness, which is said; the innermost where
    neither is.

    Args:
        frames: Of the call, the innermost last.
    """
    known = [each for each in frames if each.filename.startswith((PACKAGE + os.sep, HARNESS + os.sep))]
    inner = [each for each in known if Path(each.filename).name != Path(__file__).name]
    frame = (inner or list(frames))[-1]
    whose = "the harness, " if frame.filename.startswith(HARNESS + os.sep) else ""
    return f"{whose}{Path(frame.filename).name}:{frame.lineno} {frame.name}"


def waits_told(result: Result, waits: collections.Counter[str]) -> None:
    """Add waits by line, those of lit_rl first."""
    ours = sum(count for line, count in waits.items() if not line.startswith("the harness"))
    result.figure("waits for the card in a step", ours, note="by torch.cuda.set_sync_debug_mode, without the harness's")
    for line, count in waits.most_common(LINES):
        result.figure(f"wait {line}", count)


def profile_told(result: Result, events: Sequence[Any]) -> None:
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
    result.figure(
        "launches a token", inside / TRACED.completion_tokens, note="all rows together, the prompts' included"
    )
    by_name: collections.Counter[str] = collections.Counter()
    for event in kernels:
        by_name[event.name] += event.time_range.elapsed_us()
    for name, took in by_name.most_common(KERNELS):
        result.figure(f"kernel {name[:90]}", took / 1e6, "s", f"{took / span:.1%} of the step")


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length that spans cover together, where they overlap once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


if __name__ == "__main__":
    stage({each.__name__: each for each in (machine, main_command, trl, figures, step_trace)})
