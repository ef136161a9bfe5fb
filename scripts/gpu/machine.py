"""The card, and what it can do: name, driver, versions, commit; the rate of matrix products and of copies, measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch
from bench import machine
from bench.revision import revision

from gpu.result import SMALL, Result, stage
from gpu.training import GIB, GPU

PACKAGES = ("torch", "triton", "transformers", "lightning", "peft", "accelerate", "trl", "liger-kernel", "datasets")
PACKAGES += ("huggingface-hub", "pyarrow", "numpy", "hydra-core")


def run(result: Result, work: Path) -> None:
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
        limits = machine.measure(device, size=256, floats=2**20) if SMALL else machine.measure(device, 8192, 2**29)
        for dtype, rate in limits.flops.items():
            result.figure(f"matrix rate, {dtype}", rate / 1e12, "TFLOP/s")
        result.figure("copy rate", limits.copy / 1e9, "GB/s", "bytes read and written")
        result.figure("read rate", limits.read / 1e9, "GB/s")


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return "unknown"


if __name__ == "__main__":
    stage(run)
