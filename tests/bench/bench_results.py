"""Results as a run would leave them, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.suites import Benchmark, Contender
from bench.workload import Workload

MACHINE: dict[str, Any] = {
    "flops": {"float32": 5e10, "bfloat16": 1e11},
    "copy": 1e10,
    "read": 8e9,
    "processor": "a processor",
    "flags": {"amx_bf16": False, "avx512_bf16": True},
    "cores": 2,
    "memory": 16e9,
    "torch": "2",
    "capability": "AVX512",
}


def contender(
    rounds: Sequence[Sequence[float]], *, side: str = "ours", role: str | None = None, technique: str | None = None
) -> dict[str, Any]:
    """One with these seconds in each round: half of a step is generation; CPU seconds are twice the seconds."""
    turns = [
        {
            "round": number,
            "seconds": list(steps),
            "cpu": [2 * step for step in steps],
            "phases": [{"generate": step / 2, "reward": 0.0, "optimize": step / 10} for step in steps],
            "peak": 1e9 + number,
            "foreign": 0.01 + 0.1 * (number == 1),
            "load": [0.1, 0.2],
            "tries": 1,
        }
        for number, steps in enumerate(rounds)
    ]
    return {
        "side": side,
        "dtype": "float32",
        "technique": technique,
        "role": role,
        "settings": {"overrides": ["a=b"]} if side == "ours" else {"config": {"bf16": False}},
        "turns": turns,
        "first_step": 12.0,
        "flops": 2e9,
        "gate": {"tokens": 64, "logprobs": 1e-6, "cosine": 1.0, "norm": 0.0, "loss": None, "allowed": 1e-4},
    }


def result(workload: Workload, contenders: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A benchmark of these."""
    shape = {"rounds": 2, "steps": 3, "warmups": 2, "resident": True, "series": None, "factor": 1}
    code = {"commit": "0123456789abcdef", "changed": False}
    when = {"minutes": 3.0, "date": "2026-01-01", "load": [0.1, 0.2], "code": code}
    rates = {"rates": {name: MACHINE[name] for name in ("flops", "copy", "read")}}
    return {"workload": asdict(workload), **shape, **when, **rates, **more, "contenders": dict(contenders)}


def run(*results: Mapping[str, Any], suite: str = "bench") -> dict[str, Any]:
    """What a run leaves in its file."""
    versions = {"trl": "1.16.0", "transformers": "5", "torch": "2"}
    return {
        "suite": suite,
        "machine": MACHINE,
        "threads": 2,
        "versions": versions,
        "benchmarks": list(results),
    }


def small(workload: Workload, contenders: Sequence[Contender]) -> Benchmark:
    """One round of one step."""
    return Benchmark(workload, contenders, rounds=1, steps=1, warmups=1, again=0)
