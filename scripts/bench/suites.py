"""Contenders and the workloads in which they take part. Rows of these tables are all there is to add when a technique
gets a switch.

Ours are settings on the command line of `train.py`; TRL's are arguments of its config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bench.workload import Workload

OURS = "lit_rl, float32"
BF16_TRUE = "lit_rl, bf16-true"
REFERENCE = "TRL, float32"
"""What the gate compares with: no reduced precision, no checkpointing. Also a candidate for the best tuning."""
DEFAULT = "TRL, default"
DEFAULT_ASLEEP = "TRL, default, waiting threads sleep"
SPINNING = "TRL, bf16 weights, whole batch, waiting threads spin"
LIKE_OURS = "TRL, bf16 weights, whole batch, threads and memory as train.py's"
WITH_LORA = "TRL, bf16 weights, whole batch, threads and memory as train.py's, LoRA"
TUNED_LORA = f"{WITH_LORA}, rows of the frozen head laid together"
DEFAULT_FLOAT32 = "TRL, default but float32"
DEFAULT_FLOAT32_ASLEEP = "TRL, default but float32, waiting threads sleep"
"""Of a processor without units for bfloat16, where TRL's default takes a hundred times as long: nobody would wait."""


@dataclass(frozen=True)
class Contender:
    """A system with its settings."""

    name: str
    side: Literal["ours", "peer"]
    dtype: Literal["float32", "bfloat16"]
    """What it computes in, which the gate allows for."""
    settings: Callable[[Workload], Mapping[str, Any]]
    """Of `workload.Spec`."""
    technique: str | None = None
    """Of ours: the one that is switched off."""
    role: Literal["default", "tuned"] | None = None
    """Of the peer's: as it comes, or a candidate for its best tuning. None where it trains something else."""
    own_parameters: bool = False
    """It trains parameters that the reference has not (LoRA): the gate compares no gradient."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its process."""
    threads: int | None = None
    """Threads of each of its processes; None takes the benchmark's."""


SLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait for each other sleep. A busy neighbour slows a step less by far, and on a quiet machine they may
wake later than threads that spin: TRL takes part with both."""
BRIEF = SLEEP | {"GOMP_SPINCOUNT": "10000"}
"""They spin for a moment first: what `train.py` sets."""
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Memory that is freed stays with the process: what `train.py` makes glibc do once it runs."""


def ours(name: str, *overrides: str, dtype: Literal["float32", "bfloat16"] = "float32", **more: Any) -> Contender:
    """lit_rl with these overrides."""
    return Contender(name, "ours", dtype, lambda workload: {"overrides": list(overrides)}, environment=BRIEF, **more)


FLOAT32 = ours(OURS, "trainer.precision=32-true")
MIXED = ours("lit_rl, bf16-mixed", "trainer.precision=bf16-mixed", dtype="bfloat16")
BFLOAT16 = ours(BF16_TRUE, "trainer.precision=bf16-true", dtype="bfloat16")
PRECISIONS = (FLOAT32, MIXED, BFLOAT16)
"""Ours, each precision by its name: which one `train.py` takes by itself depends on the processor."""
BASES = {"float32": FLOAT32, "bf16-true": BFLOAT16}
"""What techniques may be switched off of, by the names that `run` takes."""


def also(base: Contender, name: str, *overrides: str, **more: Any) -> Contender:
    """Return a contender of ours with further overrides.

    Args:
        base: The contender.
        name: What the other is called: behind the name of this one.
        overrides: The further ones.
        more: Other fields of `Contender` that differ.
    """

    def settings(workload: Workload) -> Mapping[str, Any]:
        return {"overrides": [*base.settings(workload)["overrides"], *overrides]}

    return replace(base, name=f"{base.name}, {name}", settings=settings, **more)


LORA = {"r": 16, "alpha": 32}
"""Rank and scale of the adapter that both sides train on all linear layers."""
CHECKPOINTED = also(BFLOAT16, "gradient checkpointing", "model.gradient_checkpointing=true")
SPLIT = also(BFLOAT16, "split masters", "optimizer=adamw_split")
ADAPTER = also(BFLOAT16, "LoRA", *(f"model.lora.{key}={value}" for key, value in LORA.items()), own_parameters=True)
"""Settings that need less memory."""


@dataclass(frozen=True)
class Switch:
    """A technique, and the settings that switch it off."""

    technique: str
    off: Sequence[str]
    methods: Sequence[str] = ("grpo", "dpo", "sft")
    """Where it is on by default."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What is computed in without it; None: what is computed in with it."""
    only: Callable[[Workload], bool] | None = None
    """Workloads in which it does anything; None: all of its methods."""

    def acts(self, workload: Workload) -> bool:
        return workload.method in self.methods and (self.only is None or self.only(workload))


SWITCHES = (
    Switch("own decode loop", ["generator=hf"], methods=("grpo",)),
    Switch("rows without an advantage skipped", ["algo.skip_zero_advantages=false"], methods=("grpo",)),
    Switch("a prompt's keys and values once a group", ["generator.speedups.grouped_cache=false"], methods=("grpo",)),
    Switch("decode steps past the modules", ["generator.speedups.lean_steps=false"], methods=("grpo",)),
    Switch("head fused with the softmax", ["model.speedups.fused_head=false"]),
    Switch("a group's prompt once in training", ["model.speedups.shared_prompts=false"], methods=("grpo",)),
    Switch("its keys attended to where they lie", ["model.speedups.folded_attention=false"], methods=("grpo",)),
    Switch("one sum for the gradients of embedding and head", ["model.speedups.fused_accumulation=false"]),
    Switch("rows of like length together", ["model.speedups.rows_by_length=false"]),
    Switch("activations kept for the backward pass", ["model.gradient_checkpointing=true"]),
    Switch("the entropy that is logged", ["algo.log_entropy=false"]),
    Switch(
        "waiting groups in the places of rows that end",
        ["generator.speedups.continuous_batching=false"],
        methods=("grpo",),
        only=lambda workload: workload.places is not None,
    ),
    Switch(
        "rewards while others are still written",
        ["reward.while_generating=false"],
        methods=("grpo",),
        only=lambda workload: workload.slow_rewards,
    ),
    Switch(
        "micro-batches of like length",
        ["data.group_by_length=false"],
        methods=("dpo", "sft"),
        only=lambda workload: workload.micro_batches is not None,
    ),
)
"""Techniques that are on by default, a line each, and the entropy, which only the log reads. Each is switched off
alone."""


SPECIAL = tuple(switch for switch in SWITCHES if switch.only is not None)
"""Those that act in few workloads."""


def ablations(workload: Workload, base: Contender = FLOAT32, switches: Sequence[Switch] = SWITCHES) -> list[Contender]:
    """Return ours with each of these techniques off that acts in the workload, one at a time."""
    return [
        also(
            base,
            f"without: {switch.technique}",
            *switch.off,
            technique=switch.technique,
            dtype=switch.dtype or base.dtype,
        )
        for switch in switches
        if switch.acts(workload)
    ]


@dataclass(frozen=True)
class Peer:
    """A setting of TRL."""

    name: str
    dtype: Literal["float32", "bfloat16"]
    config: Mapping[str, Any] = field(default_factory=dict)
    rows_at_once: int | None = None
    """Rows of a forward pass; None: TRL's default, 8. 0: all of the step."""
    methods: Sequence[str] = ("grpo", "dpo", "sft")
    role: Literal["default", "tuned"] | None = "tuned"
    spin: bool = False
    """Threads that wait spin, as OpenMP has it by itself."""
    like_ours: bool = False
    """Threads and memory as `train.py` sets them."""
    lora: bool = False
    """An adapter is trained, of our size."""
    rows_together: bool = False
    """See `peer.lay_rows_together`."""

    def contender(self) -> Contender:
        environment = BRIEF | KEEP if self.like_ours else {} if self.spin else SLEEP
        more = {"role": self.role, "own_parameters": self.lora}
        return Contender(self.name, "peer", self.dtype, self._settings, environment=environment, **more)

    def _settings(self, workload: Workload) -> Mapping[str, Any]:
        rows = workload.rows if workload.generates else workload.prompts
        found = dict(self.config)
        if self.rows_at_once is not None:
            size = min(rows, self.rows_at_once or rows)
            found |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": rows // size}
        adapter = {"r": LORA["r"], "lora_alpha": LORA["alpha"], "lora_dropout": 0.0, "target_modules": "all-linear"}
        together = {"rows_together": True} if self.rows_together else {}
        return {"config": found} | ({"lora": adapter} if self.lora else {}) | together


_FLOAT32 = {"bf16": False, "gradient_checkpointing": False}
_BF16_WEIGHTS = {"model_init_kwargs": {"dtype": "bfloat16"}, "gradient_checkpointing": False}
PEERS = (
    Peer(REFERENCE, "float32", _FLOAT32, rows_at_once=0),
    Peer(DEFAULT, "bfloat16", role="default", spin=True),
    Peer(DEFAULT_ASLEEP, "bfloat16", role="default"),
    Peer(DEFAULT_FLOAT32, "float32", {"bf16": False}, role="default", spin=True),
    Peer(DEFAULT_FLOAT32_ASLEEP, "float32", {"bf16": False}, role="default"),
    Peer("TRL, float32, waiting threads spin", "float32", _FLOAT32, rows_at_once=0, spin=True),
    Peer("TRL, float32, 8 rows at once", "float32", _FLOAT32),
    Peer("TRL, bf16 weights, whole batch", "bfloat16", _BF16_WEIGHTS, rows_at_once=0),
    Peer(SPINNING, "bfloat16", _BF16_WEIGHTS, rows_at_once=0, spin=True),
    Peer(LIKE_OURS, "bfloat16", _BF16_WEIGHTS, rows_at_once=0, like_ours=True),
    Peer("TRL, float32, threads and memory as train.py's", "float32", _FLOAT32, rows_at_once=0, like_ours=True),
    Peer("TRL, autocast, whole batch", "bfloat16", {"gradient_checkpointing": False}, rows_at_once=0),
    Peer(
        "TRL, autocast, whole batch, threads and memory as train.py's",
        "bfloat16",
        {"gradient_checkpointing": False},
        rows_at_once=0,
        like_ours=True,
    ),
    Peer("TRL, bf16 weights, 8 rows at once", "bfloat16", _BF16_WEIGHTS),
    Peer(
        "TRL, bf16 weights, 8 rows at once, threads and memory as train.py's", "bfloat16", _BF16_WEIGHTS, like_ours=True
    ),
    Peer(
        "TRL, bf16 weights, static cache",
        "bfloat16",
        _BF16_WEIGHTS | {"cache_implementation": "static"},
        rows_at_once=0,
        methods=("grpo",),
    ),
    Peer(WITH_LORA, "bfloat16", _BF16_WEIGHTS, rows_at_once=0, like_ours=True, lora=True, role=None),
    Peer(
        TUNED_LORA,
        "bfloat16",
        _BF16_WEIGHTS,
        rows_at_once=0,
        like_ours=True,
        lora=True,
        rows_together=True,
        role=None,
    ),
)
"""TRL as it comes, and every tuning that was thought of; the fastest of a benchmark is its "TRL tuned". Weights in
bfloat16 train next to nothing at a learning rate of 1e-6: they stand here so that the comparison is with the fastest
that its settings allow. Continuous batching is left out: it takes no lengths by row."""


def peers(workload: Workload, names: Sequence[str] | None = None) -> list[Contender]:
    """Return settings of TRL for a workload, the gate's reference first.

    Args:
        workload: What is computed.
        names: Which settings beside the reference. None: all.
    """
    chosen = [peer for peer in PEERS if workload.method in peer.methods]
    return [peer.contender() for peer in chosen if names is None or peer.name in (REFERENCE, *names)]


# -------------------------------------------------------------------------------------------------------------- suites


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
    """Return every contender of every workload, tiny: does it run? Figures of it mean nothing."""
    once = {"rounds": 1, "steps": 1, "warmups": 1, "again": 0}
    return [replace(one, workload=_tiny(one.workload), **once) for one in full(base) if one.series is None]


def _tiny(work: Workload) -> Workload:
    small = replace(work, shape="tiny", prompts=2, group=min(work.group, 4), prompt_tokens=8, completion_tokens=8)
    return replace(small, places=work.places and 4, micro_batches=work.micro_batches and 2)


def bench(base: Contender = FLOAT32) -> list[Benchmark]:
    """Return C1 with prompts of 64 tokens, and each technique of one contender of ours off in turn."""
    return [Benchmark(C1, _all_of(C1, base), rounds=3, steps=5, again=1)]


def _all_of(work: Workload, base: Contender, *more: Contender) -> list[Contender]:
    """Return TRL, ours in each precision, and each technique off in turn."""
    return [*peers(work, FEW), *PRECISIONS, *more, *ablations(work, base)]


def tuning(base: Contender = FLOAT32) -> list[Benchmark]:
    """Return which setting of TRL is its fastest on a machine."""
    settings = replace(C1, name="Settings of TRL, prompt 64")
    left_out = (DEFAULT_FLOAT32, DEFAULT_FLOAT32_ASLEEP, WITH_LORA, TUNED_LORA)
    theirs = [one for one in peers(settings) if one.name not in left_out]
    return [Benchmark(settings, theirs, rounds=3, steps=5, resident=False)]


def full(base: Contender = FLOAT32) -> list[Benchmark]:
    """Return C1 to C3, A1 to A4, M1, and cost against work."""
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
    """Return A1 to A4: ours, and the techniques off that act nowhere else."""
    found = []
    for work in (FEW_PLACES, SLOW_REWARDS, OF_PAIRS, OF_TEXTS):
        who = [FLOAT32, *([] if base is FLOAT32 else [base]), *ablations(work, base, SPECIAL)]
        found.append(Benchmark(work, who, rounds=5, steps=5, resident=False))
    return found


def two_processes() -> Benchmark:
    """Return M1: one process with one thread beside two of them, whole copies and shards."""
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
    """Return points of up to 8 times the completions, and up to 8 times the tokens of each."""
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
    """Adapt to a processor without units for bfloat16: TRL's default and its tunings are in float32."""
    workload = benchmark.workload
    compared = any(one.name == DEFAULT for one in benchmark.contenders)
    kept = [one for one in benchmark.contenders if one.dtype == "float32" and one.side == "ours"]
    reference = [one for one in benchmark.contenders if one.name == REFERENCE]
    theirs = peers(workload, WITHOUT_BFLOAT16)[1:] if compared else []
    return replace(benchmark, contenders=[*reference, *theirs, *kept])


def only(benchmark: Benchmark, wanted: Sequence[str]) -> Benchmark:
    """Return some contenders: those of these names, and where a text is no name, those whose name holds it.

    What the gate compares with takes its first step for that, and no turns where it is not among them.
    """
    kept = [one for one in benchmark.contenders if any(_is_meant(one, text, benchmark) for text in wanted)]
    first = benchmark.contenders[0]
    return replace(benchmark, contenders=kept, reference=None if first in kept else first)


def _is_meant(contender: Contender, text: str, benchmark: Benchmark) -> bool:
    if any(one.name == text for one in benchmark.contenders):
        return contender.name == text
    return text in contender.name
