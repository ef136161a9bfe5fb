"""The measures of results: the gate (same completions, loss, log-probs and gradient, or no figure), and the bound, what
the machine can do at most.

**The gate.** Every contender takes its first step with completions that all are given, in its real loop. What it made
of them is held against TRL in float32, without gradient checkpointing. A contender that computes in bfloat16 may round:
by the limits below, or, where TRL itself rounds far (in deep models), 1.5 times as far as TRL does.

**The machine** is measured before anything else: the rate of matrix products, and memory bandwidth (section 4 of the
protocol: the best of several, buffers far larger than any cache).

**The bound** is what a step cannot be faster than at these rates: arithmetic only. N backbone and head parameters, L
layers, h query heads of width d, kappa bytes of keys and values a token, b_w bytes a weight, F FLOP/s, beta bytes/s; n
prompts of P tokens, completions of lengths T_i:

    prefill     2 N_b n P / F
    decode      sum_t max(bytes_t / beta, flops_t / F), over the rows that are not over at token t
                bytes_t = b_w N + kappa (n P + sum t)           the keys of a prompt read once for its group
                flops_t = 2 N rows_t + 4 L h d sum (P + t)
    train       (6 N_b T_tok + 6 N_e T_comp + 3 A) / F          T_tok = n P + sum T_i
                A = 4 L h d (pairs of prompts, and of completions with what stands before them)
    optimizer   30 N / beta                                     AdamW in float32, bfloat16 weights written
    reference   a third of `train`, where a loss reads one

The FLOPs are those of `lit_rl.models.model_costs`, of which a run's `mfu` is made too. Useful FLOPs here count
each row with its own prompt, T_tok = sum (P + T_i), as contenders differ in whether they share it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from bench.protocol import cosine_and_ratio, key_of
from bench.suites import Contender
from bench.workload import SHAPES, Workload, exact
from lit_rl.models.model_costs import Cost, ModelFlops, Span


class GateError(Exception):
    """A contender computes something else than the reference."""


@dataclass(frozen=True)
class Limits:
    """The distances by which a contender may be off."""

    logprobs: float
    """Nats, of any token."""
    cosine: float
    """Of the gradients, at least."""
    norm: float
    """Of the gradients' norms, relative."""
    loss: float
    """Relative to the larger of 1 and the loss."""


LIMITS = {
    "float32": Limits(logprobs=1e-4, cosine=0.999, norm=1e-3, loss=1e-4),
    "bfloat16": Limits(logprobs=2e-2, cosine=0.999, norm=2e-2, loss=2e-2),
}


@dataclass(frozen=True)
class Agreement:
    """The distances by which a contender was off."""

    tokens: int
    """Tokens whose log-probs were compared."""
    logprobs: float | None
    """Largest difference; None where log-probs are not compared (pairs, texts: their loss is made of them)."""
    cosine: float | None
    """None, as `norm`, where other parameters are trained than the reference's."""
    norm: float | None
    loss: float | None
    """None where the process held a part of the rows only."""

    def faults(self, limits: Limits) -> list[str]:
        """Return what is further off than it may be. A NaN is."""
        found = []
        if self.logprobs is not None and not self.logprobs <= limits.logprobs:
            found.append(f"log-probs differ by up to {self.logprobs:.2g} nats (allowed {limits.logprobs:g})")
        if self.cosine is not None and not self.cosine >= limits.cosine:
            found.append(f"the cosine of the gradients is {self.cosine:.5f} (at least {limits.cosine})")
        if self.norm is not None and not self.norm <= limits.norm:
            found.append(f"the gradients' norms differ by {self.norm:.2%} (allowed {limits.norm:.1%})")
        if self.loss is not None and not self.loss <= limits.loss:
            found.append(f"the losses differ by {self.loss:.2g} (allowed {limits.loss:g})")
        return found


def compare(reference: Mapping[str, Any], other: Mapping[str, Any], *, gradients: bool = True) -> Agreement:
    """Compare two first steps, as `read_first_step` gives them; rows that only one has are left to `missing`.

    Args:
        reference: The reference's.
        other: The other one.
        gradients: Whether both train the same parameters.

    Raises:
        KeyError: a parameter has a gradient on one side only; says which.
    """
    both = [key for key in other["logprobs"] if key in reference["logprobs"]]
    differences = [
        abs(a - b) for key in both for a, b in zip(reference["logprobs"][key], other["logprobs"][key], strict=True)
    ]
    cosine, norm = None, None
    if gradients:
        cosine, ratio = cosine_and_ratio(reference["gradient"], other["gradient"])
        norm = abs(ratio - 1)
    loss = other["loss"]
    if loss is not None:
        loss = abs(loss - reference["loss"]) / max(1.0, abs(reference["loss"]))
    largest = max(differences, key=lambda x: (x != x, x)) if differences else None
    return Agreement(len(differences), largest, cosine, norm, loss)


def missing(workload: Workload, given: Sequence[Sequence[int]], other: Mapping[str, Any]) -> int:
    """Return rows that were not scored, though they teach something: one whose reward is its group's mean may be left
    out."""
    rewards = [exact(ids, workload.is_dead(row)) for row, ids in enumerate(given)]
    groups = [rewards[start : start + workload.group] for start in range(0, len(rewards), workload.group)]
    means = [sum(group, Fraction()) / len(group) for group in groups for _ in group]
    live = [key_of(ids) for ids, reward, mean in zip(given, rewards, means, strict=True) if reward != mean]
    return sum(key not in other["logprobs"] for key in live)


def check(
    contender: Contender,
    workload: Workload,
    first: Mapping[str, Any],
    given: Sequence[Sequence[int]],
    reference: Mapping[str, Any],
    peer_rounds: float = 0.0,
) -> dict[str, Any]:
    """Return how far a contender is off, and under "allowed" how many nats it may be.

    Args:
        contender: Which one.
        workload: What it computed.
        first: Its first step.
        given: The completions that all were given.
        reference: The reference's first step.
        peer_rounds: How far TRL itself is off in bfloat16, nats.

    Raises:
        GateError: further than allowed; says in what.
    """
    try:
        found = compare(reference, first, gradients=not contender.own_parameters)
    except KeyError as error:
        raise GateError(f"{workload.name}: {contender.name}: {error.args[0]}.") from error
    limits = LIMITS[contender.dtype]
    if contender.dtype == "bfloat16":
        limits = replace(limits, logprobs=max(limits.logprobs, 1.5 * peer_rounds))
    faults = found.faults(limits)
    if first["loss"] is not None and (lost := missing(workload, given, first)):
        faults.append(f"{lost} completions that teach something were not scored")
    if faults:
        raise GateError(
            f"{workload.name}: {contender.name} computes something else than the reference: {'; '.join(faults)}."
        )
    return asdict(found) | {"allowed": limits.logprobs}


# --------------------------------------------------------------------------- the machine, and the code that runs on it


FLAGS = ("amx_bf16", "amx_tile", "avx512_bf16", "avx512f", "avx2")
"""Of the processor, those that decide what bfloat16 costs."""
LONG_PRODUCT = 5.0
"""Seconds of a matrix product that is too long to be taken several times."""


@dataclass(frozen=True)
class Rates:
    """Best measured rates."""

    flops: dict[str, float]
    """Matrix products, FLOP/s, by dtype."""
    copy: float
    """Bytes/s read and written."""
    read: float
    """Bytes/s read."""

    @property
    def has_bfloat16(self) -> bool:
        """Return whether products in bfloat16 are not slower than in float32, as they are where no unit is made for
        them."""
        return self.flops["bfloat16"] >= self.flops["float32"]

    @property
    def best_flops(self) -> float:
        return max(self.flops.values())

    @property
    def best_bytes(self) -> float:
        return max(self.copy, self.read)


def measure_machine(device: str = "cpu", size: int = 4096, floats: int = 2**27, times: int = 9) -> Rates:
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
        if 2 * size**3 / rate < LONG_PRODUCT:
            rate = _products(dtype, device, size, times)
        flops[str(dtype).removeprefix("torch.")] = rate
    x = torch.ones(floats, device=device)
    y = torch.empty_like(x)
    copied = 2 * x.nbytes / _best(lambda: y.copy_(x), device, times)
    return Rates(flops, copied, x.nbytes / _best(x.sum, device, times))


def _products(dtype: torch.dtype, device: str, size: int, times: int) -> float:
    """Return FLOP/s of the fastest product."""
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


def describe_machine(device: str = "cpu") -> dict[str, Any]:
    """Return name and flags of the processor, cores, machine_memory, and the versions of what computes."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    told = {name.strip(): value.strip() for name, value in lines.items()}
    flags = set(told.get("flags", "").split())
    found = {
        "processor": told.get("model name", platform.processor() or platform.machine()),
        "flags": {name: name in flags for name in FLAGS},
        "cores": os.cpu_count(),
        "memory": machine_memory(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    return found | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {})


def machine_memory() -> int:
    """Return bytes of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def busy_seconds(cores: Sequence[int]) -> float:
    """Return CPU seconds that all processes together have used on these cores since the machine started."""
    seconds = 0.0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in {f"cpu{core}" for core in cores}:
            user, nice, system, _, _, interrupts, soft, steal = map(int, fields[:8])
            seconds += (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")
    return seconds


ROOT = Path(__file__).resolve().parents[2]


def revision(root: Path = ROOT) -> dict[str, Any]:
    """Return the commit, None where git does not know one; "changed" says whether tracked files differ from it.

    Files of `docs/` do not count: a benchmark writes there.
    """
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)docs")
    return {"commit": commit or None, "changed": bool(changes)}


def _git(root: Path, *arguments: str) -> str:
    """Return what git says; nothing where it has nothing to say, or is not there."""
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


# ------------------------------------------------------------------------------------------------- the bound of a step


WEIGHT_BYTES = 2
"""Of a weight and of a key or value in the bound: bfloat16, whatever a contender uses."""


@dataclass(frozen=True)
class Dims:
    """The sizes of a model that the bound is made of."""

    backbone: int
    """Parameters without the language-model head."""
    head: int
    """Parameters of the head; tied, so they are the embedding's."""
    layers: int
    query_width: int
    """h d."""
    kv_width: int
    """Heads of keys times their width."""

    @classmethod
    def of(cls, shape: str) -> Dims:
        """Return those of a shape of `workload`: Qwen2, with biases on queries, keys and values."""
        c: dict[str, Any] = SHAPES[shape]
        hidden, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
        kv = hidden // c["num_attention_heads"] * c["num_key_value_heads"]
        attention = 2 * hidden * hidden + 2 * hidden * kv + hidden + 2 * kv
        layer = attention + 3 * hidden * inner + 2 * hidden
        return cls(layers * layer + hidden, c["vocab_size"] * hidden, layers, hidden, kv)

    @property
    def total(self) -> int:
        return self.backbone + self.head

    @property
    def flops(self) -> ModelFlops:
        """Return the costs where every weight is trained."""
        pair = 4 * self.layers * self.query_width
        token, scored = (Cost(2 * weights, 4 * weights) for weights in (self.backbone, self.head))
        return ModelFlops(token, scored, {None: Cost(pair, 2 * pair)})

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of keys and values of a token, in bfloat16."""
        return 2 * self.layers * self.kv_width * WEIGHT_BYTES


def decode_bytes(dims: Dims, prompts: int, prompt_tokens: int, lengths: Sequence[int]) -> list[float]:
    """Return bytes that are read at each token, the keys of a prompt once."""
    return [
        WEIGHT_BYTES * dims.total + dims.kv_bytes * (prompts * prompt_tokens + t * sum(x >= t for x in lengths))
        for t in range(1, max(lengths) + 1)
    ]


def decode_flops(dims: Dims, prompt_tokens: int, lengths: Sequence[int]) -> list[int]:
    """Return FLOPs of each token."""
    alive = [sum(x >= t for x in lengths) for t in range(1, max(lengths) + 1)]
    return [
        dims.flops.of([Span(prompt_tokens + t - 1, 1)] * rows, rows).forward for t, rows in enumerate(alive, start=1)
    ]


def train_flops(dims: Dims, prompts: int, prompt_tokens: int, lengths: Sequence[int], *, shared: bool) -> int:
    """Return FLOPs of forward and backward.

    Args:
        dims: The model's.
        prompts: How many, where they are shared.
        prompt_tokens: Of each.
        lengths: Of the completions.
        shared: Whether a prompt is computed once for its group.
    """
    copies = prompts if shared else len(lengths)
    spans = [Span(0, prompt_tokens)] * copies + [Span(prompt_tokens, x) for x in lengths]
    return dims.flops.of(spans, sum(lengths)).training


@dataclass(frozen=True)
class Bound:
    """Least seconds of a step, by part."""

    prefill: float
    decode: float
    train: float
    reference: float
    optimizer: float

    @property
    def step(self) -> float:
        return self.prefill + self.decode + self.train + self.reference + self.optimizer


@dataclass(frozen=True)
class Work:
    """The work that a rollout of a workload asks for."""

    dims: Dims
    prompts: int
    prompt_tokens: int
    lengths: Sequence[int]
    live: Sequence[int]
    """Lengths of the completions that teach something."""
    live_prompts: int
    generates: bool
    reads_reference: bool

    @classmethod
    def of(cls, workload: Workload, rollout: int) -> Work:
        lengths = workload.lengths_of(rollout)
        live = [length for row, length in enumerate(lengths) if not workload.is_dead(row)]
        return cls(
            Dims.of(workload.shape),
            workload.prompts,
            workload.prompt_tokens,
            lengths,
            live,
            len(live) // workload.group,
            workload.generates,
            workload.method == "dpo",
        )

    @property
    def train_flops(self) -> float:
        """Return the least that the training has to execute."""
        return train_flops(self.dims, self.live_prompts, self.prompt_tokens, self.live, shared=True)

    @property
    def useful_flops(self) -> float:
        """Return those of every row with its own prompt, dead groups too."""
        return train_flops(self.dims, self.prompts, self.prompt_tokens, self.lengths, shared=False)

    def bound(self, flops: float, bytes_: float) -> Bound:
        """Return the bound on a machine with these rates a second."""
        decode, prefill = 0.0, 0.0
        if self.generates:
            read = decode_bytes(self.dims, self.prompts, self.prompt_tokens, self.lengths)
            computed = decode_flops(self.dims, self.prompt_tokens, self.lengths)
            decode = sum(max(a / bytes_, b / flops) for a, b in zip(read, computed))
            prefill = 2 * self.dims.backbone * self.prompts * self.prompt_tokens / flops
        train = self.train_flops / flops
        reference = train / 3 if self.reads_reference else 0.0
        return Bound(prefill, decode, train, reference, 30 * self.dims.total / bytes_)
