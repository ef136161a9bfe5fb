"""Which workloads and contenders a command runs, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.contenders import (
    DEFAULT,
    DEFAULT_ASLEEP,
    DEFAULT_FLOAT32,
    DEFAULT_FLOAT32_ASLEEP,
    LIKE_OURS,
    OURS,
    REFERENCE,
    VARIANTS,
    Contender,
    ablations,
    ours,
    peers,
)
from bench.workload import Workload


@dataclass(frozen=True)
class Benchmark:
    """Contenders that take turns at one workload."""

    workload: Workload
    contenders: Sequence[Contender]
    """The first one is the gate's reference."""
    rounds: int
    steps: int
    """Timed steps of a turn."""
    warmups: int = 2
    """Steps before the first that counts, the gate's included."""
    again: int = 2
    """Times that a turn is repeated at most, where other processes took too much of the processor."""
    resident: bool = True
    """Contenders stay between their turns. False: each turn is a fresh process, so that memory holds one at a time."""
    series: str | None = None
    """The axis of work that this is a point of: "completions" or "tokens"."""
    factor: int = 1
    """How many times the work of the series' first point."""


C1 = Workload("C1, prompt 64", prompt_tokens=64, completion_tokens=64)
C2 = Workload("C2, 0.5B shape", shape="0.5b", prompts=2, group=4, prompt_tokens=64, completion_tokens=16)
DPO = Workload("C3, DPO", method="dpo", prompts=16, group=2, prompt_tokens=128, completion_tokens=128)
SFT = Workload("C3, SFT", method="sft", prompts=16, group=1, prompt_tokens=128, completion_tokens=128)


FEW = (
    DEFAULT,
    DEFAULT_ASLEEP,
    "TRL, bf16 weights, whole batch",
    "TRL, bf16 weights, whole batch, waiting threads spin",
    LIKE_OURS,
    "TRL, autocast, whole batch",
)
"""TRL as it comes, and the tunings that may be its fastest; `tuning` measures all of them."""

FLOAT32 = (
    DEFAULT_FLOAT32,
    DEFAULT_FLOAT32_ASLEEP,
    "TRL, float32, waiting threads spin",
    "TRL, float32, threads and memory as train.py's",
    "TRL, float32, 8 rows at once",
)
"""The same where nothing computes in bfloat16."""


def smoke() -> list[Benchmark]:
    """Does it run? Figures of it mean nothing."""
    tiny = replace(C1, name="smoke", shape="tiny", prompts=2, group=4, prompt_tokens=8, completion_tokens=8)
    return [Benchmark(tiny, [*peers(tiny, [DEFAULT]), ours(OURS)], rounds=1, steps=2, warmups=1, again=0)]


def bench() -> list[Benchmark]:
    """C1 with prompts of 64 tokens."""
    who = [*peers(C1, FEW), ours(OURS), *VARIANTS, *ablations(C1)]
    return [Benchmark(C1, who, rounds=3, steps=5)]


def tuning() -> list[Benchmark]:
    """Which setting of TRL is its fastest on a machine."""
    settings = replace(C1, name="Settings of TRL, prompt 64")
    theirs = [one for one in peers(settings) if one.name not in (DEFAULT_FLOAT32, DEFAULT_FLOAT32_ASLEEP)]
    return [Benchmark(settings, theirs, rounds=3, steps=5, resident=False)]


def full() -> list[Benchmark]:
    """C1 to C3, M1, and cost against work."""
    long = replace(C1, name="C1, prompt 256", prompt_tokens=256)
    variable = replace(C1, name="C1, variable lengths", lengths="variable")
    dead = replace(C1, name="C1, half-dead groups", lengths="variable", dead=True)
    few = {work: [*peers(work, FEW), ours(OURS), *VARIANTS] for work in (C1, long, variable, dead, DPO, SFT)}
    first = [
        Benchmark(work, [*few[work], *ablations(work)], rounds=5, steps=5, resident=False)
        for work in (C1, long, DPO, SFT)
    ]
    second = [Benchmark(work, few[work], rounds=5, steps=5, resident=False) for work in (variable, dead)]
    half_b = Benchmark(C2, [*peers(C2, FEW), ours(OURS), *VARIANTS], rounds=3, steps=3, resident=False)
    return [*first, *second, half_b, two_processes(), *cost_against_work()]


def two_processes() -> Benchmark:
    """M1: one process with one thread beside two of them."""
    two = ours("two processes", "strategy=ddp", "trainer.devices=2", threads=1)
    alone = ours("one process", threads=1)
    return Benchmark(replace(C1, name="M1, two processes"), [alone, two], rounds=5, steps=5)


def cost_against_work() -> list[Benchmark]:
    """Up to 8 times the completions, and up to 8 times the tokens of each."""
    found = []
    for factor in (1, 2, 4, 8):
        more = replace(C1, name=f"{factor} x completions", prompts=factor * C1.prompts)
        longer = replace(C1, name=f"{factor} x tokens", completion_tokens=factor * C1.completion_tokens)
        for work, series in ((more, "completions"), (longer, "tokens")):
            who = [*peers(work, [DEFAULT]), ours(OURS)]
            found.append(Benchmark(work, who, rounds=1, steps=3, resident=False, series=series, factor=factor))
    return found


def gpu() -> list[Benchmark]:
    """G1 in ten minutes: Qwen2.5-0.5B's shape, 32 prompts of 128 tokens, 8 completions of 512, fixed and variable."""
    fixed = Workload("G1", shape="0.5b", prompts=32, group=8, prompt_tokens=128, completion_tokens=512)
    variable = replace(fixed, name="G1, variable lengths", lengths="variable")
    theirs = peers(fixed, [DEFAULT, "TRL, bf16 weights, 8 rows at once"], rows_at_once=8)
    once = {"rounds": 1, "steps": 2, "again": 0, "resident": False}
    return [
        Benchmark(fixed, [*theirs, ours(OURS), *VARIANTS, *ablations(fixed)], **once),
        Benchmark(variable, [ours(OURS), *peers(variable, [DEFAULT])[1:]], **once),  # ours met the reference above
    ]


SUITES = {"smoke": smoke, "bench": bench, "tuning": tuning, "full": full, "gpu": gpu}
"""By the names that `run` takes."""


def without_bfloat16(benchmark: Benchmark) -> Benchmark:
    """For a processor without units for bfloat16: TRL as it comes is its default in float32, and so are its tunings."""
    workload = benchmark.workload
    compared = any(one.name == DEFAULT for one in benchmark.contenders)
    kept = [one for one in benchmark.contenders if one.dtype == "float32" and one.side == "ours"]
    reference = [one for one in benchmark.contenders if one.name == REFERENCE]
    theirs = peers(workload, FLOAT32)[1:] if compared else []
    return replace(benchmark, contenders=[*reference, *theirs, *kept])


def without_peer(benchmark: Benchmark) -> Benchmark:
    """Ours alone, where there is no TRL: each setting is held against the first."""
    return replace(benchmark, contenders=[one for one in benchmark.contenders if one.side == "ours"])
