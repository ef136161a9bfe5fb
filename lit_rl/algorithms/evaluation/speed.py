"""Speed of the devices of a run: tokens, arithmetic and memory by phase, and the share of time that had no phase.

    mfu = operations of the update / (seconds of the update x devices x peak of a device)

The operations are those of `lit_rl.models.policy.flops`: what the update's forward and backward passes have to compute.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from lit_rl.algorithms.ranks import Ranks

PHASES = ("generate", "reward", "score", "update")
"""Phases of a rollout. `score`: log-probs of the policy before its update and of the reference, where needed, and
advantages."""


class Peak(NamedTuple):
    """Peak TFLOP/s of a card's dense matrix products."""

    half: float
    """TFLOP/s in bfloat16 and float16, accumulated in float32."""
    single: float | None
    """TFLOP/s in float32, without TF32; None where it was not looked up."""


CARDS = {
    "B200": Peak(2250, None),
    "H200 NVL": Peak(835, 60),
    "H200": Peak(989.4, 66.9),
    "H100 NVL": Peak(835, None),
    "H100 PCIe": Peak(756, 51.2),
    "H100": Peak(989.4, 66.9),
    "A100": Peak(312, 19.5),
    "L40S": Peak(362, None),
    "L4": Peak(121, 30.3),
    "A10": Peak(125, 31.2),
}
"""Peaks by a part of `torch.cuda.get_device_name`, longer names first. In half precision they are those of TRL 1.16's
table, in float32 those of Lightning's (`lightning.fabric.utilities.throughput`), where available; a test compares both.
Lightning's own `get_available_flops` is not used: it does not find an H200 or a B200 by its name, and takes an L40S for
an L4."""

_OTHERS = frozenset({"MIG", "Laptop", "D"})
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
    if peak is None or _OTHERS & {*words.split()}:
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    tera = peak.half if half else peak.half / 2 if tf32 else peak.single
    return None if tera is None else 1e12 * tera


class Work(NamedTuple):
    """The work of a micro-batch or a step in this process."""

    flops: float = 0.0
    """Operations of the update; 0 where the model's are not known."""
    learned: float = 0.0
    """Learned tokens: of rollouts, all sampled tokens in computed rows."""

    def plus(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.learned + other.learned)


class Speed:
    """A meter of the devices' work since the last line of the log."""

    def __init__(self) -> None:
        self._done = Work()
        self._since: float | None = None

    def begin(self) -> None:
        """Start the clock of shares, with the first rollout or step of this process."""
        self._since = time.perf_counter() if self._since is None else self._since

    def restart(self) -> None:
        """Count the work of an update from here."""
        self._done = Work()

    def add(self, work: Work) -> None:
        """Count the work of a micro-batch, or of a step."""
        self._done = self._done.plus(work)

    def line(
        self,
        ranks: Ranks,
        *,
        seconds: Mapping[str, float],
        sampled: float,
        held: Mapping[str, int],
        devices: int,
        peak: float | None,
    ) -> dict[str, float]:
        """Return the metrics since the last line, and begin anew. A collective.

        Args:
            ranks: The ranks of the run.
            seconds: Seconds of each phase, on rank 0.
            sampled: Tokens sampled by all ranks.
            held: Bytes of each phase in this process.
            devices: Number of devices of the run.
            peak: Peak FLOP/s of each; None where not known.
        """
        now, shares = time.perf_counter(), ranks.objects((self._done, {phase: held.get(phase, 0) for phase in PHASES}))
        total, most = Work(), dict.fromkeys(PHASES, 0)
        for done, theirs in shares:
            total = total.plus(done)
            most = {phase: max(size, theirs[phase]) for phase, size in most.items()}
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
        self._done, self._since = Work(), now
        return metrics


def is_speed(name: str) -> bool:
    """Tell whether a metric is of time, speed or memory, which differ in each run, also in a resumed one."""
    told = ("tokens_per_second", "tflops_per_second", "mfu", "idle_share")
    return name.startswith(("time/", "memory/", "tokens_per_second")) or "env/seconds" in name or name in told
