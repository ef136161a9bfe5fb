"""Who takes part. Rows of these tables are all there is to add when a technique gets a switch.

Ours are settings on the command line of `train.py`; TRL's are arguments of its config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bench.workload import Workload

OURS = "lit_rl"
"""The defaults of `train.py`."""
REFERENCE = "TRL, float32"
"""What the gate compares with: no reduced precision, no checkpointing. Also a candidate for the best tuning."""
DEFAULT = "TRL, default"
DEFAULT_ASLEEP = "TRL, default, waiting threads sleep"
LIKE_OURS = "TRL, bf16 weights, whole batch, threads and memory as train.py's"
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
    """Of the peer's: as it comes, or a candidate for its best tuning. The fastest of a role stands for it."""
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


@dataclass(frozen=True)
class Switch:
    """How a technique is switched off."""

    technique: str
    off: Sequence[str]
    methods: Sequence[str] = ("grpo", "dpo", "sft")
    """Where it is on by default."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What is computed in without it; None: what is computed in with it."""


SWITCHES = (
    Switch("own decode loop", ["generator=hf"], methods=("grpo",)),
    Switch("rows without an advantage skipped", ["algo.skip_zero_advantages=false"], methods=("grpo",)),
    Switch("a prompt's keys and values once a group", ["generator.grouped_cache=false"], methods=("grpo",)),
    Switch("decode steps past the modules", ["generator.lean_steps=false"], methods=("grpo",)),
    Switch("head fused with the softmax", ["model.fused_head=false"]),
    Switch("a group's prompt once in training", ["model.shared_prompts=false"], methods=("grpo",)),
    Switch("rows of like length together", ["model.rows_by_length=false"]),
    Switch("no gradient checkpointing", ["model.gradient_checkpointing=true"]),
)
"""Techniques that are on by default. Each is switched off alone."""

VARIANTS = (
    ours("lit_rl, bf16-mixed", "trainer.precision=bf16-mixed", dtype="bfloat16"),
    ours("lit_rl, bf16-true", "trainer.precision=bf16-true", dtype="bfloat16"),
)
"""Settings that are not the default and may be faster on some machine."""


def ablations(workload: Workload, base: Contender | None = None) -> list[Contender]:
    """Ours with each technique off, one at a time."""
    base = ours(OURS) if base is None else base
    return [without(base, switch) for switch in SWITCHES if workload.method in switch.methods]


def without(base: Contender, switch: Switch) -> Contender:
    """A contender of ours, one technique switched off."""

    def settings(workload: Workload) -> Mapping[str, Any]:
        return {"overrides": [*base.settings(workload)["overrides"], *switch.off]}

    name = f"{base.name}, without: {switch.technique}"
    return replace(base, name=name, settings=settings, technique=switch.technique, dtype=switch.dtype or base.dtype)


@dataclass(frozen=True)
class Peer:
    """A setting of TRL."""

    name: str
    dtype: Literal["float32", "bfloat16"]
    config: Mapping[str, Any] = field(default_factory=dict)
    rows_at_once: int | None = None
    """Rows of a forward pass; None: TRL's default, 8. 0: all of the step."""
    methods: Sequence[str] = ("grpo", "dpo", "sft")
    role: Literal["default", "tuned"] = "tuned"
    spin: bool = False
    """Threads that wait spin, as OpenMP has it by itself."""
    like_ours: bool = False
    """Threads and memory as `train.py` sets them."""

    def contender(self) -> Contender:
        environment = BRIEF | KEEP if self.like_ours else {} if self.spin else SLEEP
        return Contender(self.name, "peer", self.dtype, self._settings, role=self.role, environment=environment)

    def _settings(self, workload: Workload) -> Mapping[str, Any]:
        rows = workload.rows if workload.generates else workload.prompts
        found = dict(self.config)
        if self.rows_at_once is not None:
            size = min(rows, self.rows_at_once or rows)
            found |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": rows // size}
        return {"config": found}


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
    Peer("TRL, bf16 weights, whole batch, waiting threads spin", "bfloat16", _BF16_WEIGHTS, rows_at_once=0, spin=True),
    Peer(LIKE_OURS, "bfloat16", _BF16_WEIGHTS, rows_at_once=0, like_ours=True),
    Peer("TRL, float32, threads and memory as train.py's", "float32", _FLOAT32, rows_at_once=0, like_ours=True),
    Peer("TRL, autocast, whole batch", "bfloat16", {"gradient_checkpointing": False}, rows_at_once=0),
    Peer("TRL, bf16 weights, 8 rows at once", "bfloat16", _BF16_WEIGHTS),
    Peer(
        "TRL, bf16 weights, static cache",
        "bfloat16",
        _BF16_WEIGHTS | {"cache_implementation": "static"},
        rows_at_once=0,
        methods=("grpo",),
    ),
)
"""TRL as it comes, and every tuning that was thought of; the fastest of a benchmark is its "TRL tuned". Weights in
bfloat16 train next to nothing at a learning rate of 1e-6: they stand here so that the comparison is with the fastest
that its settings allow. Continuous batching is left out: it takes no lengths by row."""


def peers(workload: Workload, names: Sequence[str] | None = None, rows_at_once: int | None = None) -> list[Contender]:
    """Settings of TRL for a workload, the gate's reference first.

    Args:
        workload: What is computed.
        names: Which settings beside the reference. None: all.
        rows_at_once: Rows of a forward pass, where a whole batch would not fit. None: what the settings say.
    """
    chosen = [peer for peer in PEERS if workload.method in peer.methods]
    if rows_at_once is not None:
        chosen = [peer if peer.role == "default" else replace(peer, rows_at_once=rows_at_once) for peer in chosen]
    return [peer.contender() for peer in chosen if names is None or peer.name in (REFERENCE, *names)]
