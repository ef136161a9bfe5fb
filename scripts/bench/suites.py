"""Which workloads and contenders a command runs, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.contenders import (
    ADAPTER,
    BFLOAT16,
    CHECKPOINTED,
    DEFAULT,
    DEFAULT_ASLEEP,
    DEFAULT_FLOAT32,
    DEFAULT_FLOAT32_ASLEEP,
    FLOAT32,
    LIKE_OURS,
    PRECISIONS,
    REFERENCE,
    SPECIAL,
    SPINNING,
    SPLIT,
    TUNED_LORA,
    WITH_LORA,
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
    """The first one is the gate's reference, unless `reference` says another."""
    rounds: int
    steps: int
    """Timed steps of a turn."""
    warmups: int = 2
    """Steps before the first that counts, the gate's included."""
    again: int = 2
    """Times that a round is repeated at most, where other processes took too much of the processor in a turn."""
    resident: bool = True
    """Contenders wait between their turns, as many as half of the memory holds. False: each turn is a fresh process, as
    it always is where lengths are variable: so all contenders have the same rollouts."""
    reference: Contender | None = None
    """What the gate compares with, where it takes no turns."""
    series: str | None = None
    """The axis of work that this is a point of: "completions" or "tokens"."""
    factor: int = 1
    """How many times the work of the series' first point."""


C1 = Workload("C1, prompt 64", prompt_tokens=64, completion_tokens=64)
C2 = Workload("C2, 0.5B shape", shape="0.5b", prompts=2, group=4, prompt_tokens=64, completion_tokens=16)
DPO = Workload("C3, DPO", method="dpo", prompts=16, group=2, prompt_tokens=128, completion_tokens=128)
SFT = Workload("C3, SFT", method="sft", prompts=16, group=1, prompt_tokens=128, completion_tokens=128)


FEW = (DEFAULT, DEFAULT_ASLEEP, SPINNING, LIKE_OURS)
"""TRL as it comes, and the tunings that may be its fastest; `tuning` measures all of them."""

WITHOUT_BFLOAT16 = (
    DEFAULT_FLOAT32,
    DEFAULT_FLOAT32_ASLEEP,
    "TRL, float32, waiting threads spin",
    "TRL, float32, threads and memory as train.py's",
    "TRL, float32, 8 rows at once",
)
"""The same where nothing computes in bfloat16."""


LONG = replace(C1, name="C1, prompt 256", prompt_tokens=256)
VARIABLE = replace(C1, name="C1, variable lengths", lengths="variable")
DEAD = replace(C1, name="C1, half-dead groups", lengths="variable", dead=True)


FEW_PLACES = replace(VARIABLE, name="A1, 16 places", prompts=8, places=16)
SLOW_REWARDS = replace(VARIABLE, name="A2, slow rewards", slow_rewards=True)
OF_PAIRS, OF_TEXTS = (
    replace(work, name=f"{name} in 4 micro-batches", lengths="variable", micro_batches=4)
    for work, name in ((DPO, "A3, DPO"), (SFT, "A4, SFT"))
)
"""Where techniques act that do nothing in C1 to C3."""


def smoke(base: Contender = FLOAT32) -> list[Benchmark]:
    """Does it run? Every contender of every workload, tiny. Figures of it mean nothing."""
    once = {"rounds": 1, "steps": 1, "warmups": 1, "again": 0}
    return [replace(one, workload=_tiny(one.workload), **once) for one in full(base) if one.series is None]


def _tiny(work: Workload) -> Workload:
    small = replace(work, shape="tiny", prompts=2, group=min(work.group, 4), prompt_tokens=8, completion_tokens=8)
    return replace(small, places=work.places and 4, micro_batches=work.micro_batches and 2)


def bench(base: Contender = FLOAT32) -> list[Benchmark]:
    """C1 with prompts of 64 tokens, and each technique of one contender of ours off in turn."""
    return [Benchmark(C1, _all_of(C1, base), rounds=3, steps=5, again=1)]


def _all_of(work: Workload, base: Contender, *more: Contender) -> list[Contender]:
    """TRL, ours in each precision, and each technique off in turn."""
    return [*peers(work, FEW), *PRECISIONS, *more, *ablations(work, base)]


def tuning(base: Contender = FLOAT32) -> list[Benchmark]:
    """Which setting of TRL is its fastest on a machine."""
    settings = replace(C1, name="Settings of TRL, prompt 64")
    left_out = (DEFAULT_FLOAT32, DEFAULT_FLOAT32_ASLEEP, WITH_LORA, TUNED_LORA)
    theirs = [one for one in peers(settings) if one.name not in left_out]
    return [Benchmark(settings, theirs, rounds=3, steps=5, resident=False)]


def full(base: Contender = FLOAT32) -> list[Benchmark]:
    """C1 to C3, A1 to A4, M1, and cost against work."""
    first = [
        Benchmark(work, _all_of(work, base, *more), rounds=5, steps=5, resident=False)
        for work, more in (
            (C1, ()),
            (LONG, ()),
            (VARIABLE, ()),
            (DEAD, ()),
            (DPO, (CHECKPOINTED,)),
            (SFT, (CHECKPOINTED,)),
        )
    ]
    theirs = peers(C2, (*FEW, WITH_LORA, TUNED_LORA))
    half_b = Benchmark(C2, [*theirs, *PRECISIONS, SPLIT, ADAPTER], rounds=3, steps=3, resident=False)
    return [*first, half_b, *alone(base), two_processes(), *cost_against_work()]


def alone(base: Contender) -> list[Benchmark]:
    """A1 to A4: ours, and the techniques off that act nowhere else."""
    found = []
    for work in (FEW_PLACES, SLOW_REWARDS, OF_PAIRS, OF_TEXTS):
        who = [FLOAT32, *([] if base is FLOAT32 else [base]), *ablations(work, base, SPECIAL)]
        found.append(Benchmark(work, who, rounds=5, steps=5, resident=False))
    return found


def two_processes() -> Benchmark:
    """M1: one process with one thread beside two of them, whole copies and shards."""
    alone, two, shards = (
        ours(name, "trainer.precision=32-true", *settings, threads=1)
        for name, *settings in (
            ("one process",),
            ("two processes", "strategy=ddp", "trainer.devices=2"),
            ("two processes, FSDP2", "strategy=fsdp", "trainer.devices=2"),
        )
    )
    return Benchmark(replace(C1, name="M1, two processes"), [alone, two, shards], rounds=5, steps=5)


def cost_against_work() -> list[Benchmark]:
    """Up to 8 times the completions, and up to 8 times the tokens of each."""
    found = []
    for factor in (1, 2, 4, 8):
        more = replace(C1, name=f"{factor} x completions", prompts=factor * C1.prompts)
        longer = replace(C1, name=f"{factor} x tokens", completion_tokens=factor * C1.completion_tokens)
        for work, series in ((more, "completions"), (longer, "tokens")):
            who = [*peers(work, [DEFAULT]), FLOAT32, BFLOAT16]
            found.append(Benchmark(work, who, rounds=1, steps=3, resident=False, series=series, factor=factor))
    return found


SUITES = {"smoke": smoke, "bench": bench, "tuning": tuning, "full": full}
"""By the names that `run` takes, of the contender whose techniques are switched off."""


def without_bfloat16(benchmark: Benchmark) -> Benchmark:
    """For a processor without units for bfloat16: TRL as it comes is its default in float32, and so are its tunings."""
    workload = benchmark.workload
    compared = any(one.name == DEFAULT for one in benchmark.contenders)
    kept = [one for one in benchmark.contenders if one.dtype == "float32" and one.side == "ours"]
    reference = [one for one in benchmark.contenders if one.name == REFERENCE]
    theirs = peers(workload, WITHOUT_BFLOAT16)[1:] if compared else []
    return replace(benchmark, contenders=[*reference, *theirs, *kept])


def only(benchmark: Benchmark, wanted: Sequence[str]) -> Benchmark:
    """Some contenders: those of these names, and where a text is no name, those whose name holds it.

    What the gate compares with takes its first step for that, and no turns where it is not among them.
    """
    kept = [one for one in benchmark.contenders if any(_is_meant(one, text, benchmark) for text in wanted)]
    first = benchmark.contenders[0]
    return replace(benchmark, contenders=kept, reference=None if first in kept else first)


def _is_meant(contender: Contender, text: str, benchmark: Benchmark) -> bool:
    if any(one.name == text for one in benchmark.contenders):
        return contender.name == text
    return text in contender.name
