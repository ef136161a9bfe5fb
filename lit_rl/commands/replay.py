"""`lit-rl replay`: one saved rollout, several objectives: what each would make of it, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lit_rl.algorithms.evaluation.statistics import Averages
from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.rollouts import state
from lit_rl.algorithms.rollouts.micro_batches import micro_batch, rows_of_slots, step_counts, totals_of
from lit_rl.algorithms.rollouts.plan import BatchPlan
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.callbacks.rollouts import SavedRollout
from lit_rl.commands.replay_report import Outcome, Report, say, write
from lit_rl.commands.replay_tokens import SeenTokens, write_tokens
from lit_rl.commands.saved_policy import saved_policy
from lit_rl.ops.masking import masked_sum
from lit_rl.ops.step import Metrics
from lit_rl.process_state import generators_kept
from lit_rl.rollout import PromptBatch, Rollout

_CHUNK = 1 << 24
_LARGE = 4 << 30
"""Bytes of gradients held at once above which a note is printed."""


@dataclass(frozen=True)
class Replay:
    """The objectives to compare, built but not loaded."""

    modules: list[tuple[str, PolicyGradient]]
    """Objectives with their names, all of one model description, one reference and one sampling."""
    rollout: SavedRollout
    source: Path
    """The file of the rollout."""
    checkpoint: Path
    """The file of the policy's weights."""
    folder: Path
    """Folder for the numbers."""
    fabric: L.Fabric
    """Device and precision."""
    notes: list[str]
    """Notes on the method for the reader."""


def replay(job: Replay) -> int:
    """Compute, print and write loss and gradient of every objective, for the whole rollout as one optimizer step.

    Raises:
        StorageError: the checkpoint is not of the run's model.
        RewardError, ConfigError: an objective needs what was not saved.
    """
    with generators_kept():
        step = _load(job)
    notes = [*job.notes, *_notes(job, step)]
    measured = [_measure(name, module, job) for name, module in job.modules]
    gradients = [each.gradient for each in measured]
    cosines = [[_cosine(one, two) for two in gradients] for one in gradients]
    report = Report(
        rollout=str(job.source),
        rollout_step=job.rollout.step,
        completions=len(job.rollout),
        checkpoint=str(job.checkpoint),
        policy_step=step,
        notes=notes,
        objectives=[each.outcome for each in measured],
        cosines=cosines,
    )
    say(report)
    write(report, job.folder)
    write_tokens(measured[0].tokens, job.rollout.step, job.folder, job.modules[0][1].tokenizer)
    return 0


@dataclass(frozen=True)
class _Measured:
    """The measurements of one objective."""

    outcome: Outcome
    gradient: Tensor
    """Float32, one vector, on the CPU."""
    tokens: SeenTokens


# ---------------------------------------------------------------------- what all objectives share


def _load(job: Replay) -> int:
    """Load one policy for all modules, with the checkpoint's weights, and one reference; return its step."""
    wanted = job.rollout.ref_logprobs is None and any(module.needs_reference for _, module in job.modules)
    host = next((m for _, m in job.modules if m.needs_reference == wanted), job.modules[0][1])
    host.configure_model()
    saved = saved_policy(job.checkpoint, beside=["reference"])
    # The same way that a resumed run takes: refuses another model's weights, and brings a reference that moved.
    host.on_load_checkpoint({"state_dict": saved.weights, **saved.beside})
    host.load_state_dict(saved.weights, strict=False)
    job.fabric._precision.convert_module(host)
    host.to(job.fabric.device)
    for _, module in job.modules:
        module.policy, module.reference_policy = host.policy, host.reference_policy
        module.fabric = job.fabric  # what asks for a world size and a device asks it here
        module.to(job.fabric.device)
        module.plan = _plan(module, job.rollout)
    return saved.step


def _plan(module: PolicyGradient, rollout: SavedRollout) -> BatchPlan:
    """Return the whole rollout as one optimizer step, cut as the run cut it."""
    return BatchPlan(
        prompts_per_rollout=len(rollout.rows),
        group_size=module.group_size,
        minibatches=1,
        iterations=1,
        accumulate=rollout.micro_batches,
        world_size=1,
        split_groups=rollout.split_groups,
    )


def _old_logprobs(rollout: SavedRollout) -> Tensor:
    return rollout.completions.sampler_logprobs if rollout.old_logprobs is None else rollout.old_logprobs


def _notes(job: Replay, step: int) -> list[str]:
    rollout, notes = job.rollout, []
    if step == rollout.step:
        notes.append("policy and rollout are of the same step: every ratio is about 1, and nothing is clipped")
    if step < rollout.step:
        notes.append("the policy is older than the rollout: ratios say how it was before, not after, an update")
    if rollout.old_logprobs is None:
        notes.append("the run took no old log-probs: those that the generator reported stand for them")
    if rollout.world_size > 1:
        notes.append(f"the rows are those of rank 0: a share of 1/{rollout.world_size} of the rollout")
    if any(module.groups is not None for _, module in job.modules):
        notes.append("groups that an objective would replace by fresh ones are left out")
    size = 4 * len(job.modules) * sum(p.numel() for p in _trained(job.modules[0][1].policy))
    if size > _LARGE:
        notes.append(f"the gradients took {size / (1 << 30):.1f} GiB of memory: name fewer losses to lower it")
    return notes


# ---------------------------------------------------------------------- one objective


def _measure(name: str, module: PolicyGradient, job: Replay) -> _Measured:
    """Return loss and gradient of one objective, and its view of the tokens."""
    with generators_kept():
        torch.manual_seed(module.seed)  # dropout, where there is any, and random shares are the same for all
        with job.fabric.autocast(), module.rollout_context():
            scored, rollout = _credited(module, job)
        module.policy.train()
        return _backward(name, module, SeenTokens.of(scored, rollout), job)


def _credited(module: PolicyGradient, job: Replay) -> tuple[Scored, Rollout]:
    """Return the rollout with this objective's advantages. Log-probs that were saved with it are never recomputed."""
    saved, device = job.rollout, job.fabric.device
    greedy = None if saved.greedy_rewards is None else saved.greedy_rewards.to(device)
    texts = module.tokenizer.batch_decode([ids[mask].tolist() for ids, mask in _prompts(saved)])
    rows = PromptBatch(texts, [], {}, saved.rows, [0] * len(saved.rows), rollout=saved.number)
    scored = Scored(rows, state.to_device_dataclass(saved.completions, device), saved.scores, greedy_rewards=greedy)
    scored, _ = module.choose(scored)
    ref = None if saved.ref_logprobs is None else saved.ref_logprobs.to(device)
    if module.needs_reference and ref is None:
        ref = module.ref_logprobs(scored.completions)
    rollout, _ = module.advantages(scored, _old_logprobs(saved).to(device), ref)
    return scored, rollout


def _prompts(saved: SavedRollout) -> list[tuple[Tensor, Tensor]]:
    group = len(saved) // len(saved.rows)
    return list(zip(saved.completions.prompt_ids[::group], saved.completions.prompt_mask[::group]))


def _backward(name: str, module: PolicyGradient, seen: SeenTokens, job: Replay) -> _Measured:
    plan, saved, rollout = module.plan, job.rollout, seen.rollout
    assert plan is not None
    (counts,) = step_counts(rollout, plan, seed=module.seed, index=saved.number)
    slots = rows_of_slots(rollout, plan, seed=module.seed, index=saved.number)
    micros = [micro_batch(rollout, rows) for rows in slots]
    with job.fabric.autocast():
        step = module.look_ahead(micros) if module.needs_step and len(micros) > 1 else None
    parameters = _trained(module.policy)
    gradient = torch.zeros(sum(p.numel() for p in parameters))
    averages, total = Averages(), 0.0
    for rows, micro in zip(slots, micros):
        with job.fabric.autocast():
            scores = module.token_scores(micro.completions)
            scores.logprobs.retain_grad()
            loss, metrics = module.loss(micro, scores, totals_of(counts, plan), step)
        seen.add(rows, scores)
        loss.backward()
        total += float(loss.detach())
        _add_gradient(gradient, parameters)
        averages.add(metrics | _of_tokens(micro, scores.logprobs.grad))
    numbers = averages.reduce(Ranks(job.fabric.device))
    return _Measured(Outcome(name, total, math.sqrt(_dot(gradient, gradient)), numbers), gradient, seen)


def _of_tokens(micro: Rollout, gradient: Tensor | None) -> Metrics:
    """Return the mean size of an advantage, and the share of loss tokens whose log-prob the objective does not move."""
    mask, advantages = micro.loss_mask, micro.advantages
    assert advantages is not None
    per_token = advantages if advantages.ndim == 2 else advantages[:, None].expand(mask.shape)
    still = torch.ones_like(mask) if gradient is None else gradient == 0
    return {
        "advantage_size": (masked_sum(per_token.abs(), mask), mask.sum()),
        "no_gradient": ((still & mask).sum(), mask.sum()),
    }


def _trained(policy: nn.Module) -> list[nn.Parameter]:
    return [p for p in policy.parameters() if p.requires_grad]


def _add_gradient(gradient: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Add each `.grad` to the vector, and clear it."""
    start = 0
    for p in parameters:
        if p.grad is not None:
            gradient[start : start + p.numel()] += p.grad.detach().float().flatten().cpu()
            p.grad = None
        start += p.numel()


def _dot(one: Tensor, two: Tensor) -> float:
    """Return the dot product in float64, a piece at a time: float32 sums over millions of entries lose digits."""
    return sum(float(a.double() @ b.double()) for a, b in zip(one.split(_CHUNK), two.split(_CHUNK)))


def _cosine(one: Tensor, two: Tensor) -> float:
    """Return the cosine of two vectors; NaN where one of them is 0."""
    sizes: Any = math.sqrt(_dot(one, one)) * math.sqrt(_dot(two, two))
    return _dot(one, two) / sizes if sizes else math.nan
