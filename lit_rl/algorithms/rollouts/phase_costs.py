"""Seconds, memory and speed by phase of a rollout: tokens, arithmetic, and the share of time that had no phase.

    mfu = operations of the update / (seconds of the update x devices x peak of a device)

The operations are those of `lit_rl.models.model_costs`: what the update's forward and backward passes have to compute.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import record_function

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.models.model_costs import ModelFlops, Span

# ---------------------------------------------------------------------- memory


class PhaseMemory:
    """The peak memory of each phase, in bytes: of tensors on a GPU, else of the process.

    The peak of a phase is known if it is above all before it in this process. Otherwise the memory at its end counts,
    which is less: counters are not reset, as others use them too.
    """

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self._before: int | None = None

    def begin(self) -> None:
        """Begin a phase."""
        self._before = peak_memory()

    def end(self, phase: str) -> None:
        """End a phase. For one that an earlier process began, only the memory at its end is known."""
        most = peak_memory()
        rose = self._before is not None and most > self._before
        self.held[phase] = max(most if rose else current_memory(), self.held.get(phase, 0))
        self._before = None


def peak_memory() -> int:
    """Return the peak memory since the process began, in bytes."""
    return torch.cuda.max_memory_allocated() if on_gpu() else process_peak()


def current_memory() -> int:
    """Return the current memory in bytes; the peak where the system does not tell it."""
    if on_gpu():
        return torch.cuda.memory_allocated()
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else process_peak()


def process_peak() -> int:
    """Return the peak resident memory of the process in bytes; 0 on Windows, where it is unknown."""
    status = Path("/proc/self/status")
    if status.exists():  # `getrusage` includes the peak of the parent process
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.M)
        return 1024 * int(found[1]) if found else 0
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def on_gpu() -> bool:
    """Tell whether this process has had tensors on a GPU: Lightning initialises one for runs on the CPU too."""
    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.max_memory_allocated() > 0


# ---------------------------------------------------------------------- seconds


class Stopwatch:
    """A stopwatch of seconds by phase, summed until `reset`.

    Args:
        phases: The initial phases.
        memory: The memory meter of the phases.
    """

    def __init__(self, *phases: str, memory: PhaseMemory) -> None:
        self._memory = memory
        self.seconds = dict.fromkeys(phases, 0.0)
        self.parts: dict[str, float] = {}
        """Seconds of parts within a phase, by name."""

    def reset(self) -> None:
        """Set all phases back to 0."""
        self.seconds, self.parts = dict.fromkeys(self.seconds, 0.0), {}

    def load(self, seconds: Mapping[str, float], parts: Mapping[str, float]) -> None:
        """Restore the seconds of a checkpoint."""
        self.seconds, self.parts = dict(seconds), dict(parts)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to a phase; a failed block does not count."""
        self._memory.begin()
        started = time.perf_counter()
        with record_function(phase):  # its name in a trace
            yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started
        self._memory.end(phase)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Discard what is measured inside."""
        before, parts = dict(self.seconds), dict(self.parts)
        yield
        self.seconds, self.parts = before, parts

    def take(self, phase: str) -> float:
        """Return the seconds of a phase, and set it back to 0."""
        seconds, self.seconds[phase] = self.seconds[phase], 0.0
        return seconds


# ---------------------------------------------------------------------- speed


PHASES = ("generate", "reward", "score", "teacher", "update")
"""Phases of a rollout. `score`: log-probs of the policy before its update and of the reference, where needed, and
advantages. `teacher`: its scores, of algo/teacher."""


class DevicePeak(NamedTuple):
    """Peak TFLOP/s of a card's dense matrix products."""

    half: float
    """TFLOP/s in bfloat16 and float16, accumulated in float32."""
    single: float | None
    """TFLOP/s in float32, without TF32; None where it was not looked up."""


CARDS = {
    "B200": DevicePeak(2250, None),
    "H200 NVL": DevicePeak(835, 60),
    "H200": DevicePeak(989.4, 66.9),
    "H100 NVL": DevicePeak(835, None),
    "H100 PCIe": DevicePeak(756, 51.2),
    "H100": DevicePeak(989.4, 66.9),
    "A100": DevicePeak(312, 19.5),
    "L40S": DevicePeak(362, None),
    "L4": DevicePeak(121, 30.3),
    "A10": DevicePeak(125, 31.2),
}
"""Peaks by a part of `torch.cuda.get_device_name`, longer names first. In half precision they are those of TRL 1.16's
table, in float32 those of Lightning's (`lightning.fabric.utilities.throughput`), where available; a test compares both.
Lightning's own `get_available_flops` is not used: it does not find an H200 or a B200 by its name, and takes an L40S for
an L4."""

_SLOWER_CARDS = frozenset({"MIG", "Laptop", "D"})
"""Words in the names of parts of a card, and of slower cards of the same name."""


def peak_of(device: torch.device, *, half: bool) -> float | None:
    """Return the peak FLOP/s of a device; None for a CPU, and for a card that is not in the table.

    Args:
        device: The device of the model.
        half: Whether products are in bfloat16 or float16; else in float32, which with TF32 is half as fast.
    """
    if device.type != "cuda":
        return None
    words = f" {torch.cuda.get_device_name(device)} ".replace("-", " ")
    peak = next((peak for name, peak in CARDS.items() if f" {name} " in words), None)
    if peak is None or _SLOWER_CARDS & {*words.split()}:
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    tera = peak.half if half else peak.half / 2 if tf32 else peak.single
    return None if tera is None else 1e12 * tera


class UpdateWork(NamedTuple):
    """The work of a micro-batch or a step in this process."""

    flops: float = 0.0
    """Operations of the update; 0 where the model's are not known."""
    learned: float = 0.0
    """Learned tokens: of rollouts, all sampled tokens in computed rows."""

    def plus(self, other: UpdateWork) -> UpdateWork:
        return UpdateWork(self.flops + other.flops, self.learned + other.learned)


class RunCosts:
    """The costs of a run in this process: memory by phase, and the devices' work since the last line of the log."""

    def __init__(self) -> None:
        self.memory = PhaseMemory()
        self.flops: list[ModelFlops] | None = None
        """FLOPs of each trained model, once a step needed them; empty if they cannot be counted."""
        self._done = UpdateWork()
        self._since: float | None = None

    def begin(self) -> None:
        """Start the clock of shares, with the first rollout or step of this process."""
        self._since = time.perf_counter() if self._since is None else self._since

    def restart(self) -> None:
        """Count the work and the memory of an update from here."""
        self._done = UpdateWork()
        self.memory.begin()

    def add(self, work: UpdateWork) -> None:
        """Count the work of a micro-batch, or of a step."""
        self._done = self._done.plus(work)

    def flops_of_update(
        self, trained: Iterable[nn.Module], spans: Sequence[Span], own: Sequence[Span], scored: int, *, reads: int = 0
    ) -> float:
        """Return the FLOPs of forward and backward passes of the trained models; 0 if they cannot be counted.

        Args:
            trained: The policy, then other models; of these the `trunk` counts, if they have one.
            spans: Spans that the policy computes.
            own: Spans that another trained model computes: each row by itself.
            scored: Positions whose log-probs are computed.
            reads: Forward passes without gradient of models as large as the policy.
        """
        if self.flops is None:
            policy, *others = trained
            trunks = (getattr(other, "trunk", None) for other in others)
            try:
                self.flops = [ModelFlops.of_model(each) for each in (policy, *trunks) if each is not None]
            except (AttributeError, TypeError, ArithmeticError):  # no text decoder, or its config is of another kind
                self.flops = []
        costs = [flops.of(own if place else spans, scored) for place, flops in enumerate(self.flops)]
        return float(sum(cost.training for cost in costs) + reads * sum(cost.forward for cost in costs[:1]))

    def take_metrics(
        self, ranks: Ranks, trainer: Any, dtype: str, *, seconds: Mapping[str, float], sampled: float = 0.0
    ) -> dict[str, float]:
        """Return the metrics since the last log line, and begin anew. A collective.

        Args:
            ranks: The ranks of the run.
            trainer: The Trainer: its devices and its precision.
            dtype: The type of the policy's weights.
            seconds: Seconds of each phase, on rank 0.
            sampled: Tokens sampled by all ranks.
        """
        held, devices = {phase: self.memory.held.get(phase, 0) for phase in PHASES}, trainer.world_size
        half = "16" in str(trainer.precision) or dtype in ("bfloat16", "float16")
        peak = peak_of(trainer.strategy.root_device, half=half)
        now, of_ranks = time.perf_counter(), ranks.objects((self._done, held))
        total, most = UpdateWork(), dict.fromkeys(PHASES, 0)
        for done, bytes_by_phase in of_ranks:
            total = total.plus(done)
            most = {phase: max(size, bytes_by_phase[phase]) for phase, size in most.items()}
        spent = {phase: taken for phase, taken in seconds.items() if taken > 0}
        metrics = {f"memory/{phase}": size / 2**30 for phase, size in most.items() if size}
        tokens = {"generate": sampled, "update": total.learned}
        for phase, count in tokens.items():
            if count and phase in spent:
                metrics[f"tokens_per_second_per_device/{phase}"] = count / spent[phase] / devices
        if total.flops and "update" in spent:
            rate = total.flops / spent["update"] / devices
            metrics["tflops_per_second"] = rate / 1e12
            if peak is not None:
                metrics["mfu"] = rate / peak
        if self._since is not None and now > self._since:
            metrics["idle_share"] = max(0.0, 1 - sum(spent.values()) / (now - self._since))
        self._done, self._since = UpdateWork(), now
        return metrics


def is_speed(name: str) -> bool:
    """Tell whether a metric is of time, speed or memory, which differ in each run, also in a resumed one."""
    speeds = ("tokens_per_second", "tflops_per_second", "mfu", "idle_share")
    return name.startswith(("time/", "memory/", "tokens_per_second")) or "env/seconds" in name or name in speeds
