"""`lit-rl doctor`: whether a generator holds the policy, follows it when it moves, and how near its log-probs are."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.commands.doctor_advice import Compared, Findings, Planned, Sides, Update, scored
from lit_rl.commands.doctor_report import say, say_versions
from lit_rl.data.templates import encode_prompt
from lit_rl.errors import GenerationError, NumericError, in_range
from lit_rl.generation.base import Generator, as_generator, rollout_mode
from lit_rl.generation.collect import Vocabulary, with_held_back
from lit_rl.generation.noise import prompt_key
from lit_rl.generation.vllm.generator import EngineGenerator
from lit_rl.generation.vllm.probe import LIMITS
from lit_rl.models.policy.forward import score
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.shared_prefix import can_share
from lit_rl.ops.engine import engine_log_ratio, engine_ratios
from lit_rl.ops.masking import masked_mean, masked_moments
from lit_rl.ops.mismatch import effective_share, token_truncate
from lit_rl.rollout import Completions, Prompt, Prompts, Sampling

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
    planned: Planned
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
    say_versions(job.model, job.generator, job.fabric.device)
    policy = _load(job)
    try:
        findings = _examine(job, policy)
    finally:
        job.generator.close()
    say(findings)
    return 0


def _load(job: Doctor) -> Any:
    module = PolicyModule(job.model, seed=job.seed)
    module.configure_model()
    job.fabric._precision.convert_module(module)
    return module.policy.to(job.fabric.device)


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
    compared = {name: _compare(job, policy, completions, scope) for name, scope in _trainers(job, policy).items()}
    unscored = _unscored(job)
    if not unscored:
        _judge(job, compared[sides.trainer], sides, 0)
    moved = _move(job, policy, completions)
    second = _sync(job, policy, 1)
    own = _leave_out_its_own(generator)
    after = _compare(job, policy, _generate(job, prompts, scored(job.sampling)), job.fabric.autocast)
    if not own:
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


def _unscored(job: Doctor) -> tuple[str, ...]:
    """Return the keys in force by which the generator draws and the training does not score."""
    own = (f"generator.generation_kwargs.{name}" for name in job.generator.reshaped_by)
    return *(f"sampling.{name}" for name in job.sampling.unscored), *own


def _leave_out_its_own(generator: Generator) -> tuple[str, ...]:
    """Have the generator draw without settings of its own that the training does not score by.

    Returns:
        Those that cannot be left out, of a user's generator that holds them elsewhere.
    """
    kwargs: dict[str, Any] | None = getattr(generator, "generation_kwargs", None)
    if kwargs is None:
        return generator.reshaped_by
    for name in generator.reshaped_by:
        kwargs.pop(name, None)
    return ()


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
        return with_held_back(job.generator.generate(prompts, sampling), prompts.eos_ids, sampling)


def _sync(job: Doctor, policy: nn.Module, version: int) -> Update:
    generator, before = job.generator, time.perf_counter()
    with job.fabric.autocast():
        generator.sync(policy, version)
    took = time.perf_counter() - before
    if not isinstance(generator, EngineGenerator):
        return Update(start=0.0, sync=took, probe=None, gap=None)
    sync, probe = generator.seconds["sync"], generator.seconds["probe"]
    return Update(start=max(took - sync - probe, 0.0), sync=sync, probe=probe, gap=generator.gap)


def _sides(job: Doctor, policy: nn.Module) -> Sides:
    """Return the compute types and device of both sides."""
    weight = next(policy.parameters())
    facts = job.generator.facts if isinstance(job.generator, EngineGenerator) else None
    trainer, device = _computed_in(job, weight), weight.device.type
    return Sides(trainer, trainer if facts is None else facts.dtype, device if facts is None else facts.device)


def _computed_in(job: Doctor, weight: Tensor) -> str:
    """Return the type of the trainer's products."""
    kind = weight.device.type
    with job.fabric.autocast():
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return str(dtype).removeprefix("torch.")


def _trainers(job: Doctor, policy: nn.Module) -> dict[str, Scope]:
    """Return the types in which the trainer could compute, its own first. Weights in 16 bits are computed with as they
    are."""
    weight = next(policy.parameters())
    trainers: dict[str, Scope] = {_computed_in(job, weight): job.fabric.autocast}
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


def _compare(job: Doctor, policy: nn.Module, completions: Completions, scope: Scope) -> Compared:
    """Compare the generator's log-probs with the policy's."""
    old, drawn = _scored(job, policy, completions, scope), completions.sampler_logprobs
    mask = completions.response_mask
    if not old[mask].isfinite().all():
        raise NumericError("The policy's log-probs are NaN or infinite: its weights are damaged, or their type narrow.")
    difference, log_ratio = (old - drawn).abs()[mask], engine_log_ratio(old, drawn, mask)
    rows = engine_ratios(old, drawn, mask)[1][:, 0]
    return Compared(
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
                f"Random steps of the trained weights moved the policy's log-probs by {moved:.2g} nats only, so that "
                "nobody can see whether the generator follows. Does the model train anything (model.lora)?"
            )
        with torch.no_grad():
            for weight in policy.parameters():
                if weight.requires_grad:
                    scale = size * max(weight.float().square().mean().sqrt().item(), 0.01)  # adapters begin at 0
                    weight.add_(torch.randn(weight.shape, generator=generator).to(weight), alpha=scale)
        moved = (_scored(job, policy, completions, scope) - before).abs()[mask].mean().item()
        size *= 2
    return moved


def _judge(job: Doctor, found: Compared, sides: Sides, version: int) -> None:
    """Refuse a generator that draws from another distribution than the policy's. By the mean: in 16 bits single tokens
    may differ by much."""
    limit = LIMITS[sides.coarser].mean
    if found.mean <= limit:
        return
    raise GenerationError(
        f"{type(job.generator).__name__} does not draw from policy version {version}: over {found.tokens} tokens of "
        f"{found.responses} completions its log-probs differ from the trainer's by {found.mean:.3g} nats on average "
        f"(allowed in {sides.coarser}: {limit:g}) and by {found.max:.3g} at most. Try it with sampling.temperature=1 "
        "and without top_k, top_p and min_p: where that is sound, generator and trainer cut other tokens off."
    )
