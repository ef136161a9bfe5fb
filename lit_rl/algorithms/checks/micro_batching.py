"""Micro-batches: the fewest of a step, and the largest decode batch, that fit into free memory; the plan of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lit_rl.algorithms.checks.memory import GIB, Memory, MemoryPlan
from lit_rl.core.errors import ConfigError, format_bytes
from lit_rl.core.ranks import gather_objects
from lit_rl.generation.generator import InProcessGenerator
from lit_rl.models.modes import set_checkpointing

# ---------------------------------------------------------------------- memory budgets

KEPT_FREE = 0.1
"""Share of the memory that plans leave free: for kernels' workspaces, fragmentation, and other processes."""

KEPT_FREE_ON_A_CPU = 0.5
"""The same share of main memory, where the C library may hold up to 1.94 times the plan (docs/hardware.md)."""

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with a container's limit and use, for both versions of control groups."""


def memory_budget(
    device: torch.device, *, gigabytes: float | None = None, processes: int = 1, planned: int = 0
) -> int | None:
    """Return the bytes that a plan may use; None where they are not known.

    Args:
        device: The policy's device.
        gigabytes: The user's setting, in GiB, in place of the free memory.
        processes: Processes that share a CPU's memory. Each has a GPU of its own.
        planned: Bytes of tensors that are on the GPU already, and part of the plan.
    """
    if gigabytes is not None:
        return int(gigabytes * GIB * (1 - KEPT_FREE))
    if device.type == "cuda":
        # Memory that torch has reserved without tensors is available; tensors of a reward model stay.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((torch.cuda.mem_get_info(device)[0] + unused + planned) * (1 - KEPT_FREE))
    available = available_memory() if device.type == "cpu" else None
    return None if available is None else int(available * (1 - KEPT_FREE_ON_A_CPU) / processes)


def device_memory(device: torch.device, *, gigabytes: float | None = None) -> int | None:
    """Return the total bytes of a GPU, the basis of an engine's share; None without one.

    The user's setting takes precedence: the plan may be for another GPU.
    """
    if gigabytes is not None:
        return int(gigabytes * GIB)
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the available bytes of main memory, within the container's limit; None where unknown."""
    found = []
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        lines = (line.split() for line in meminfo.read_text().splitlines())
        found += [int(words[1]) * 1024 for words in lines if words and words[0] == "MemAvailable:"]
    elif root == Path("/") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit, use in _CGROUPS:
        files = root / limit[1:], root / use[1:]
        if all(file.is_file() for file in files):
            most, used = (file.read_text().strip() for file in files)
            if most.isdigit() and used.isdigit():
                found.append(max(0, int(most) - int(used)))
    return min(found, default=None)


# ---------------------------------------------------------------------- plans

MOST_DECODED = 2**20
"""Most sequences of a decode batch, and rows scored at once, where memory sets no bound."""


_WEIGHT_PARTS = ("weights", "gradients", "buckets", "optimizer", "critic", "reference", "gathered weights")
"""Parts of a plan that do not depend on rows."""

_NARROW, _MOMENTS = 2, 8
"""Bytes of a bfloat16 weight, and of AdamW's two moments in float32."""


@dataclass(frozen=True)
class StepRows:
    """The part of an optimizer step that one rank learns from.

    Args:
        units: Units that micro-batches hold whole: groups, or their slices set by the user, or rows of a data set.
        rows: Rows of a unit.
        sequences: Sequences decoded together for it, at most.
        whole: Name of the units, for messages.
        slices: Numbers of equal slices into which the plan may cut a unit that is too large, from few to many.
        sliced_by_hand: Whether only the user may cut units (`algo.split_groups`), not the plan.
    """

    units: int
    rows: int
    sequences: int = 0
    whole: str = "rows"
    slices: Sequence[int] = (1,)
    sliced_by_hand: bool = False

    def cuts(self) -> dict[int, int]:
        """Return the rows of a micro-batch by the number of micro-batches, from few to many."""
        counts = [count for count in range(1, self.units + 1) if self.units % count == 0]
        whole = {count: self.units // count * self.rows for count in counts}
        return whole | {self.units * parts: self.rows // parts for parts in self.slices}

    def slices_of(self, micro_batches: int) -> int:
        """Return the number of slices of a unit for a number of micro-batches."""
        return max(1, micro_batches // self.units)


@dataclass(frozen=True)
class MicroBatchPlan:
    """A plan of micro-batches for a step."""

    micro_batches: int
    decoded: int | None
    """Most sequences of a decode batch; None sets no bound."""
    why: str
    """The number with its reason, for the table at the start of a run."""
    recompute: bool = False
    """True where the plan chose gradient checkpointing."""
    offload: bool = False
    """True where it also keeps the inputs of layers on the host."""
    scored: int | None = None
    """Most rows of a forward pass without gradient over a data set; None sets no bound."""


def micro_batches_of_size(step: StepRows, micro_batch_size: int) -> int:
    """Return the number of micro-batches of a given size in rows.

    Raises:
        ConfigError: the step does not divide into them; names the nearest sizes that work.
    """
    sizes = {rows: count for count, rows in step.cuts().items()}
    if micro_batch_size in sizes:
        return sizes[micro_batch_size]
    near = sorted(sizes, key=lambda rows: (abs(rows - micro_batch_size), rows))[:3]
    raise ConfigError(
        f"algo.micro_batch_size={micro_batch_size} does not divide the {step.units * step.rows} rows that a rank "
        f"learns from in an optimizer step into equal micro-batches of {step.whole}. Nearest that work: "
        f"{', '.join(map(str, near))}."
    )


def fewest_micro_batches(step: StepRows, memory: Memory, budget: int) -> MicroBatchPlan:
    """Return the plan with the fewest micro-batches that fit, and the largest decode batch.

    Gradient checkpointing is chosen only where the smallest micro-batch would not fit otherwise, and offloading only
    where that is not enough.

    Raises:
        ConfigError: not even the smallest micro-batch, or one sequence, fits.
    """
    decoded, cuts = largest_decode_batch(memory, budget), step.cuts()
    needs, sizes = {}, memory
    for sizes in memory.cheaper_variants():
        needs = {}
        for count, rows in cuts.items():
            needs[count] = sizes.plan(rows, max(1, min(decoded, step.sequences)), steps_in_parts=count > 1)
            if decoded and _plan_fits(needs[count], sum(needs[count].learning.values()), budget, sizes):
                recompute = sizes is not memory
                offload = recompute and sizes.policy.offloaded
                why, scored = (
                    _reason_for_count(needs, budget, recompute, offload),
                    max(rows, rows_scored_at_once(sizes, budget)),
                )
                return MicroBatchPlan(count, decoded, why, recompute, offload, scored)
    last = max(cuts)
    rows = f"{cuts[last]} row{'s' if cuts[last] > 1 else ''}"
    raise ConfigError(too_large_message(needs[last], budget, rows, sizes, step))


def _plan_fits(plan: MemoryPlan, needed: int, budget: int, memory: Memory) -> bool:
    """Tell whether `needed` bytes fit on the device, and the offloaded ones on the host."""
    return needed <= budget and (memory.host is None or plan.host <= memory.host)


def largest_decode_batch(memory: Memory, budget: int) -> int:
    """Return the largest decode batch that fits, a power of two; 0 where not even one sequence does."""
    decoded = MOST_DECODED
    while decoded and sum(memory.plan(1, decoded, steps_in_parts=False).generating.values()) > budget:
        decoded //= 2
    return decoded


def rows_scored_at_once(memory: Memory, budget: int) -> int:
    """Return rows of a forward pass without gradient that surely fit: those of a micro-batch, a power of two."""
    rows = MOST_DECODED
    while rows > 1 and sum(memory.plan(rows, 1, steps_in_parts=False).learning.values()) > budget:
        rows //= 2
    return rows


def too_large_message(plan: MemoryPlan, budget: int, rows: str, memory: Memory, step: StepRows) -> str:
    """Return the message: needed memory by part, available memory, and settings to change."""
    worst = max((plan.learning, plan.generating), key=lambda parts: sum(parts.values()))
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in worst.items() if size)
    host = ""
    if memory.host is not None and plan.host > memory.host:
        host = (
            f" Offloading keeps {format_bytes(plan.host)} in main memory, which can give {format_bytes(memory.host)}."
        )
    return (
        f"A step does not fit: with micro-batches of {rows} it needs {format_bytes(plan.total)} ({listed}), and "
        f"{format_bytes(budget)} can be given out.{host} Set one of: {'; '.join(remedies(worst, memory, step))}."
    )


def remedies(parts: Mapping[str, int], memory: Memory, step: StepRows) -> Sequence[str]:
    """Return settings that make a step smaller, the most effective first."""
    weight_bytes = sum(parts.get(name, 0) for name in _WEIGHT_PARTS)
    activation_bytes = sum(parts.get(name, 0) for name in ("activations", "working memory", "allocator"))
    weights_dominate = weight_bytes > activation_bytes
    lora = [] if memory.policy.adapters else ["model.lora.r=16 (trains adapters)"]
    for_activations = []
    if step.sliced_by_hand and step.rows % 2 == 0:
        for_activations.append("algo.split_groups=2 or more (cuts a group, the same gradient)")
    if not memory.policy.checkpointing:
        for_activations.append("model.gradient_checkpointing=true")
    if memory.numbers.product == 4 and not weights_dominate:
        for_activations.append("trainer.precision=bf16-mixed")
    return [
        *([*lora, *weight_remedies(memory), *for_activations] if weights_dominate else [*for_activations, *lora]),
        "shorter texts (sampling.max_new_tokens, data.max_prompt_tokens, data.max_length)",
        "a smaller model",
    ]


def weight_remedies(memory: Memory) -> Sequence[str]:
    """Return settings that shrink weights, gradients and optimizer state, the most effective first."""
    policy, critic, found = memory.policy, memory.critic, []
    sharded = memory.spread_over > 1 or memory.gathered is not None
    narrow = memory.numbers.weight == _NARROW or policy.narrow
    quantised = bool(policy.adapters) and policy.bytes_of_base < _NARROW
    copied = critic is not None and not critic.adapters  # a copy of a quantised policy could not be trained
    if policy.adapters and not (quantised or sharded or copied):
        found.append("model.quantization=nf4 (the frozen base in 4 bits)")
    if not policy.adapters and memory.numbers.moments == _MOMENTS and not sharded:
        also = "" if narrow else "trainer.precision=bf16-true and "
        found.append(f"{also}optimizer=adamw_split (10 bytes a trained weight in place of 16)")
        found.append("optimizer=adamw_8bit (moments in 2 bytes a weight in place of 8)")
    if memory.ranks > 1 and not (quantised or sharded):
        found.append(f"strategy=fsdp (spreads weights and what is kept of each over {memory.ranks} devices)")
    takes_bf16 = memory.gathered is not None or not sharded
    halves = memory.numbers.product == 4 or (policy.adapters and not sharded)
    if not narrow and takes_bf16 and halves:
        found.append("trainer.precision=bf16-true (bfloat16 for what computes, the frozen weights too)")
    return found


def _reason_for_count(needs: Mapping[int, MemoryPlan], budget: int, recompute: bool, offload: bool) -> str:
    """Return the number of micro-batches with its reason: its memory, and that of the next smaller number."""
    (count, taken), *before = reversed(list(needs.items()))
    text = f"{count} (needs {format_bytes(sum(taken.learning.values()))}"
    text += " with gradient checkpointing" if recompute else ""
    text += " on the host" if offload else ""
    text += f"; {format_bytes(budget)} free"
    return text + (
        f"; {before[0][0]} would need {format_bytes(sum(before[0][1].learning.values()))})" if before else ")"
    )


def plan_micro_batches(
    size: int | Literal["auto"] | None,
    accumulate: int,
    step: StepRows,
    memory: Memory | None,
    budget: int | None,
    limit: int | None = None,
) -> tuple[MicroBatchPlan | None, str]:
    """Return the micro-batches of a step, and a warning where the user's choice does not fit, else an empty text.

    The plan is None where `accumulate` decides. Where sizes or memory are not known, "auto" takes one micro-batch.

    Args:
        size: Rows of a micro-batch; "auto" asks the memory plan; None leaves it to `accumulate`.
        accumulate: The Trainer's `accumulate_grad_batches`.
        step: The step to cut.
        memory: Its memory needs.
        budget: Bytes that a plan may use.
        limit: Bytes above which the user is warned, where that is more than `budget`; None: `budget`.

    Raises:
        ConfigError: the size does not divide the step, or with "auto" nothing fits.
    """
    if size == "auto":
        if memory is None or budget is None:
            return MicroBatchPlan(1, None, "1: what the step needs is not known"), ""
        return fewest_micro_batches(step, memory, budget), ""
    count = accumulate if size is None else micro_batches_of_size(step, int(size))
    warning = (
        "" if memory is None or budget is None else too_large_warning(step, memory, budget, count, limit or budget)
    )
    if size is None:
        return None, warning
    return MicroBatchPlan(count, None, f"{count}: algo.micro_batch_size={size}"), warning


def too_large_warning(step: StepRows, memory: Memory, budget: int, count: int, limit: int) -> str:
    """Warn that `count` micro-batches need more than `limit`, with a setting that fits; empty if they fit."""
    rows = step.units * step.rows // count
    plan = memory.plan(rows, step.sequences, steps_in_parts=count > 1)
    if _plan_fits(plan, plan.total, limit, memory):
        return ""
    try:
        better = fewest_micro_batches(step, memory, budget)
    except ConfigError as error:
        return str(error)
    fixes = [f"trainer.accumulate_grad_batches={max(count, better.micro_batches)}"]
    if better.decoded is not None and better.decoded < step.sequences:
        fixes.append(f"generator.batch_size={better.decoded}")
    if better.recompute:
        fixes.append(f"model.gradient_checkpointing={'offload' if better.offload else 'true'}")
    if (slices := step.slices_of(max(count, better.micro_batches))) > 1:
        fixes.append(f"algo.split_groups={slices}")
    text = too_large_message(plan, budget, f"{rows} rows", memory, step).partition(" Set one of: ")[0]
    return f"{text} Set {' and '.join(fixes)}; or micro_batch_size='auto' in the algorithm, which chooses by itself."


# ---------------------------------------------------------------------- the micro-batches of a run


def check_whole_groups(name: str, split_groups: int | Literal["auto"]) -> None:
    """Refuse to cut the groups of a method or a loss that compares the completions of a prompt.

    Raises:
        ConfigError: `algo.split_groups` would cut them.
    """
    if split_groups not in (1, "auto"):
        raise ConfigError(
            f"algo.split_groups={split_groups}: {name} compares completions of one prompt inside a micro-batch. Leave "
            "it at 1; a smaller algo.group_size needs less memory."
        )


class MicroBatches:
    """The micro-batches of a run: what the user set about them, what memory allows, and what the Trainer is given.

    `algo.micro_batch_size`, `algo.split_groups` and `trainer.accumulate_grad_batches` are settings of one quantity. A
    plan is applied by setting the Trainer's, and taken back by `restore`. Samples and gradients do not depend on it.

    Args:
        size: Rows of a micro-batch (`algo.micro_batch_size`); "auto" asks the memory plan; None leaves it to Lightning.
    """

    def __init__(self, size: int | Literal["auto"] | None) -> None:
        self.size: int | Literal["auto"] | None = size
        self.split_groups: int | Literal["auto"] = 1
        """Slices of a group that micro-batches hold whole; "auto" leaves them to the plan."""
        self.texts = 0
        """Texts of a row that is scored without gradient, of which as many at once as fit; 0: they are not bounded."""
        self.memory_gb: float | None = None
        """Memory that a process may use, in GiB (`plan.memory_gb`); None: what is free."""
        self.plan: MicroBatchPlan | None = None
        """The plan; None before a step is split, and where the Trainer's number decides."""
        self.step: StepRows | None = None
        """The step of a rank, once it is split."""
        self.generator: InProcessGenerator | None = None
        """The generator whose decode batches the plan bounds; None if the policy is decoded elsewhere."""
        self.most_texts: int | None = None
        """The most texts in a forward pass without gradient: in validation or of a reference a batch is as large as
        the data module makes it. None: all."""
        self._asked: StepRows | None = None
        """The step that `begin` was given, of which the plan is."""
        self._budgets: tuple[int | None, int | None] | None = None

    # ------------------------------------------------------------------ the user's settings

    @property
    def slices(self) -> int:
        """The user's slices of a group."""
        return 1 if isinstance(self.split_groups, str) else self.split_groups

    def accumulation(self, trainer: Any) -> int:
        """Return the user's `accumulate_grad_batches`: 1 if it is the plan's that the Trainer has."""
        planned = self.plan is not None and self.plan.micro_batches == trainer.accumulate_grad_batches
        return 1 if planned else trainer.accumulate_grad_batches

    def parts_of_rows(self, trainer: Any) -> int:
        """Return the divisor that the user's micro-batches require of a rank's rows of a step."""
        return max(1, self.size) if isinstance(self.size, int) else self.accumulation(trainer)

    def parts_of_groups(self, trainer: Any, group_size: int) -> int:
        """Return the divisor that the user's micro-batches require of a rank's groups of a step."""
        parts = self.accumulation(trainer)
        if isinstance(self.size, int):
            parts, left = divmod(max(1, self.size), max(1, group_size // self.slices))
            parts = 1 if left or not parts else parts  # a part of a group, or refused by the batch plan
        return parts // math.gcd(parts, self.slices)

    # ------------------------------------------------------------------ memory

    def budgets(self, trainer: Any, loaded: Iterable[Tensor] = ()) -> tuple[int | None, int | None]:
        """Return the bytes that a plan may use on every rank, and those of host memory to which a GPU may offload.

        Measured once, before the policy is loaded; None if unknown. For this process alone if no other was started.

        Args:
            trainer: The Trainer.
            loaded: Tensors that are part of the plan: those on the device already do not count as used.
        """
        if self._budgets is None:
            device, processes = trainer.strategy.root_device, trainer.num_devices
            planned = sum(tensor.nbytes for tensor in loaded if tensor.device == device)
            mine = memory_budget(device, gigabytes=self.memory_gb, processes=processes, planned=planned)
            offloads = device.type == "cuda" and self.memory_gb is None
            host = memory_budget(torch.device("cpu"), processes=processes) if offloads else None
            on_device, on_host = zip(*gather_objects((mine or 0, host or 0)))
            self._budgets = min(on_device) or None, min(on_host) or None
        return self._budgets

    def as_planned(self, memory: Memory) -> Memory:
        """Return the same needs under the gradient checkpointing that the plan chose."""
        return memory.recomputing(self.plan.offload) if self.plan is not None and self.plan.recompute else memory

    # ------------------------------------------------------------------ the plan

    def begin(self, step: StepRows, trainer: Any, checkpointing: bool | str) -> None:
        """Note the step that is to be split, before its memory is asked for.

        Args:
            step: The step of a rank.
            trainer: The Trainer.
            checkpointing: `model.gradient_checkpointing`.

        Raises:
            ConfigError: two settings say how a step is split, or activations are to leave a GPU that is not there.
        """
        if checkpointing == "offload" and trainer.strategy.root_device.type != "cuda":
            raise ConfigError(
                "model.gradient_checkpointing=offload moves activations from a GPU to the host, and this run has no "
                "GPU. Set it to true."
            )
        accumulate = self.accumulation(trainer)
        if self.size is not None and accumulate != 1:
            raise ConfigError(
                f"algo.micro_batch_size={self.size} and trainer.accumulate_grad_batches={accumulate} both set how a "
                "step is split into micro-batches. Leave one of them out."
            )
        if self._asked not in (None, step):  # another fit, of other batches
            trainer.accumulate_grad_batches, self.plan = accumulate, None
        self._asked = step
        self.step = replace(step, sequences=self._at_once(step.sequences))

    def split(self, trainer: Any, memory: Memory | None) -> None:
        """Split the step of `begin`, unless the Trainer has the plan already, and set the Trainer's micro-batches.

        Args:
            trainer: The Trainer.
            memory: The memory needs of the step; None if they are not known.

        Raises:
            ConfigError: nothing fits, or the user's micro-batches do not divide the step.
        """
        assert self.step is not None, "begin comes first"
        if self.plan is None or self.plan.micro_batches != trainer.accumulate_grad_batches:
            budget = limit = None if memory is None else memory.budget
            if budget is not None and self.memory_gb is None and trainer.strategy.root_device.type == "cpu":
                # Warn of more than all free memory only: the C library rarely holds twice what is planned.
                limit = int(budget / (1 - KEPT_FREE_ON_A_CPU))
            settings = self.size, self.accumulation(trainer)
            self.plan, warning = plan_micro_batches(*settings, self.step, memory, budget, limit)
            if warning:
                rank_zero_warn(warning)
        self._apply(trainer)

    def resume(self, plan: MicroBatchPlan, trainer: Any) -> None:
        """Split steps as the resumed run did, whatever memory is free now: last bits depend on it."""
        self.plan = plan
        self._apply(trainer)

    def restore(self, trainer: Any) -> None:
        """Give the Trainer its own micro-batches back, so that it may train another module."""
        trainer.accumulate_grad_batches = self.accumulation(trainer)

    def _apply(self, trainer: Any) -> None:
        if self.plan is not None:
            trainer.accumulate_grad_batches = self.plan.micro_batches
            self._bound_decoding(self.plan.decoded)
            self._bound_scoring(self.plan.scored)

    def set_checkpointing(self, setting: bool | str, modules: Iterable[nn.Module]) -> None:
        """Turn gradient checkpointing on in the trained modules if the plan chose it; else off.

        Args:
            setting: `model.gradient_checkpointing`; a plan has a say where it is "auto".
            modules: The trained modules.
        """
        if setting == "auto" and self.plan is not None:
            for module in modules:
                set_checkpointing(module, "offload" if self.plan.offload else self.plan.recompute)

    # ------------------------------------------------------------------ rows without gradient

    @property
    def asks_plan(self) -> bool:
        """True if a memory plan is to choose, and none has."""
        return self.size == "auto" and self.plan is None

    @property
    def decoded_at_once(self) -> int:
        """The number of sequences of the step that are decoded together."""
        return 0 if self.step is None else self._at_once(self.step.sequences)

    def _at_once(self, sequences: int) -> int:
        at_once = None if self.generator is None else self.generator.rows_a_batch
        return sequences if at_once is None else min(at_once, sequences)

    def fit_decoding(self, memory: Memory | None) -> None:
        """Bound the sequences decoded at once in a validation without training."""
        if memory is not None and memory.budget is not None:
            self._bound_decoding(max(1, largest_decode_batch(memory, memory.budget)))

    def fit_scoring(self, memory: Memory | None) -> None:
        """Bound the rows scored at once in a validation without training."""
        if memory is not None and memory.budget is not None:
            unlearned = replace(memory.numbers, gradient=0, moments=0, remainder=0)
            self._bound_scoring(rows_scored_at_once(replace(memory, numbers=unlearned, masters=0), memory.budget))

    def _bound_scoring(self, rows: int | None) -> None:
        self.most_texts = rows * self.texts if rows is not None and self.texts else None

    def _bound_decoding(self, sequences: int | None) -> None:
        if self.generator is not None:
            self.generator.bound = sequences
