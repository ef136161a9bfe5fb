"""What the machine can do at most, measured before anything else: the rate of matrix products, and memory bandwidth.

Section 4 of the protocol: the best of several, buffers far larger than any cache.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FLAGS = ("amx_bf16", "amx_tile", "avx512_bf16", "avx512f", "avx2")
"""Of the processor, those that decide what bfloat16 costs."""
LONG = 5.0
"""Seconds of a matrix product that is too long to be taken several times."""


@dataclass(frozen=True)
class Limits:
    """Best measured rates."""

    flops: dict[str, float]
    """Matrix products, FLOP/s, by dtype."""
    copy: float
    """Bytes/s read and written."""
    read: float
    """Bytes/s read."""

    @property
    def has_bfloat16(self) -> bool:
        """Whether products in bfloat16 are not slower than in float32, as they are where no unit is made for them."""
        return self.flops["bfloat16"] >= self.flops["float32"]

    @property
    def best_flops(self) -> float:
        return max(self.flops.values())

    @property
    def best_bytes(self) -> float:
        return max(self.copy, self.read)


def measure(device: str = "cpu", size: int = 4096, floats: int = 2**27, times: int = 9) -> Limits:
    """Measure with the threads that torch has now.

    Args:
        device: "cpu" or "cuda".
        size: Rows and columns of the matrices; of smaller ones where a product would take many seconds.
        floats: Length of the float32 buffers.
        times: Repetitions, of which the fastest counts.
    """
    flops = {}
    for dtype in (torch.float32, torch.bfloat16):
        rate = _products(dtype, device, min(size, 512), times=3)
        if 2 * size**3 / rate < LONG:
            rate = _products(dtype, device, size, times)
        flops[str(dtype).removeprefix("torch.")] = rate
    x = torch.ones(floats, device=device)
    y = torch.empty_like(x)
    copied = 2 * x.nbytes / _best(lambda: y.copy_(x), device, times)
    return Limits(flops, copied, x.nbytes / _best(x.sum, device, times))


def _products(dtype: torch.dtype, device: str, size: int, times: int) -> float:
    """FLOP/s of the fastest product."""
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / _best(lambda: torch.mm(a, b, out=out), device, times)


def _best(work: Callable[[], Any], device: str, times: int) -> float:
    def once() -> float:
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    once()
    return min(once() for _ in range(times))


def describe(device: str = "cpu") -> dict[str, Any]:
    """Name and flags of the processor, cores, memory, and the versions of what computes."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    told = {name.strip(): value.strip() for name, value in lines.items()}
    flags = set(told.get("flags", "").split())
    found = {
        "processor": told.get("model name", platform.processor() or platform.machine()),
        "flags": {name: name in flags for name in FLAGS},
        "cores": os.cpu_count(),
        "memory": memory(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    return found | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {})


def memory() -> int:
    """Bytes of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def busy(cores: Sequence[int]) -> float:
    """CPU seconds that all processes together have used on these cores since the machine started."""
    seconds = 0.0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in {f"cpu{core}" for core in cores}:
            user, nice, system, _, _, interrupts, soft, steal = map(int, fields[:8])
            seconds += (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")
    return seconds
