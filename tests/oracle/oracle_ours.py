"""Our side: the module that a setting of TRL's is, and its step as `training_step` takes it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from oracle_cases import (
    BASE,
    GIVEN,
    GROUP,
    LIMIT,
    PROMPTS,
    ROWS,
    TEMPERATURE,
    WEIGHTS,
    Case,
    Outcome,
    Settings,
    backward,
    first,
    second,
)
from oracle_trl import Oracle

from lit_rl.algorithms import GRPO, RLOO
from lit_rl.algorithms.evaluation.summary_statistics import SUMMARIES
from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.algorithms.rollouts.rollout_plan import BatchPlan, micro_batch, rows_of_slots, step_counts, step_totals
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.algorithms.terms.regularizers import AdaptiveEntropy, FixedEntropy
from lit_rl.core.rollout import Completions, PromptBatch, Rollout, Sampling
from lit_rl.models import LanguageModel
from lit_rl.models.references import FrozenCopy
from lit_rl.ops import advantages, engine_mismatch, kl, policy_losses, reductions, selection
from lit_rl.ops.reductions import Highest, Lowest, Metrics, Summed
from lit_rl.rewards.weighted_rewards import Rewards

MODEL = LanguageModel("tiny")
"""Lends its tokenizer; its weights are never loaded."""

REDUCTIONS = {
    "grpo": reductions.sequence_mean,
    "sapo": reductions.sequence_mean,
    "bnpo": reductions.local_token_mean,
    "dr_grpo": partial(reductions.constant_mean, length=LIMIT),
    "dapo": reductions.token_mean,
    "cispo": reductions.token_mean,
    "vespo": reductions.token_mean,
    "luspo": reductions.sequence_total,
}
LEVELS = {"token": policy_losses.token_ratio, "sequence": policy_losses.sequence_mean_ratio}
SCALES = {
    "group": advantages.group_normalized,
    "batch": advantages.batch_normalized,
    "none": advantages.centered,
}


def loss_of(trl: Settings) -> Any:
    level = LEVELS[trl["importance_sampling_level"]]
    match trl["loss_type"]:
        case "cispo":
            return partial(policy_losses.cispo_loss, cap=trl["epsilon_high"], ratio=level)
        case "sapo":
            temperatures = {
                f"temperature_{ours}": trl[f"sapo_temperature_{ours[:3]}"] for ours in ("positive", "negative")
            }
            return partial(policy_losses.sapo_loss, ratio=level, **temperatures)
        case "vespo":
            shape = {
                sign: (trl[f"vespo_k_{sign[:3]}"], trl[f"vespo_lambda_{sign[:3]}"]) for sign in ("positive", "negative")
            }
            return partial(policy_losses.vespo_loss, **shape)
        case _:
            clip = {"clip_low": trl["epsilon"], "clip_high": trl["epsilon_high"], "delta": trl["delta"]}
            return partial(policy_losses.clipped_policy_loss, ratio=level, **clip)


def kl_of(trl: Settings) -> Any:
    if not trl["use_bias_correction_kl"]:
        return kl.k3
    return kl.corrected_k3 if trl["importance_sampling_level"] == "token" else kl.sequence_corrected_k3


def correction_of(trl: Settings) -> Any:
    if not (trl["use_vllm"] and trl["vllm_importance_sampling_correction"]):
        return None
    bounds = {"low": trl["vllm_importance_sampling_clip_min"], "high": trl["vllm_importance_sampling_clip_max"]}
    return partial(getattr(engine_mismatch, trl["vllm_importance_sampling_mode"]), **bounds)


def entropy_of(trl: Settings) -> Any:
    if trl["use_adaptive_entropy"]:
        names = {"low": "min", "high": "max", "delta": "delta"}
        limits = {ours: trl[f"entropy_coef_{theirs}"] for ours, theirs in names.items()}
        return AdaptiveEntropy(trl["entropy_coef"], target=trl["entropy_target"], **limits)
    return FixedEntropy(trl["entropy_coef"]) if trl["entropy_coef"] else None


def selection_of(trl: Settings) -> Any:
    share = trl["top_entropy_quantile"]
    return partial(selection.top_entropy, share=share) if share < 1 else None


def shared_terms(trl: Settings) -> dict[str, Any]:
    return {
        "model": MODEL,
        "reward": Rewards({"first": first, "second": second}, WEIGHTS),
        "reference": FrozenCopy(),
        "sampling": Sampling(temperature=TEMPERATURE, max_new_tokens=LIMIT),
        "group_size": GROUP,
        "iterations": trl["num_iterations"],
        "mask_truncated": trl["mask_truncated_completions"],
        "router_aux_loss_coef": trl["router_aux_loss_coef"],
    }


def our_grpo(settings: Settings, **other: Any) -> GRPO:
    """The module that TRL's `GRPOConfig(**settings)` is, as docs/from-trl.md has it; `other` settings beside."""
    trl = BASE | dict(settings)
    summed_later = trl["multi_objective_aggregation"] == "normalize_then_sum"
    return GRPO(
        advantage=advantages.normalize_then_sum if summed_later else SCALES[trl["scale_rewards"]],
        loss=loss_of(trl),
        reduction=REDUCTIONS[trl["loss_type"]],
        beta=trl["beta"],
        kl=kl_of(trl),
        correction=correction_of(trl),
        selection=selection_of(trl),
        off_policy_threshold=trl["off_policy_mask_threshold"],
        entropy=entropy_of(trl),
        **shared_terms(trl) | other,
    )


def our_rloo(settings: Settings, **other: Any) -> RLOO:
    """The module that TRL's `RLOOConfig(**settings)` is; `other` settings beside."""
    trl = BASE | dict(settings)
    clip = {"clip_low": trl["epsilon"], "clip_high": trl["epsilon_high"]}
    return RLOO(
        loss=partial(policy_losses.clipped_policy_loss, ratio=policy_losses.sequence_sum_ratio, **clip),
        reward_beta=trl["beta"],
        reward_clip=trl["reward_clip_range"],
        whitening=advantages.whiten_rows if trl["normalize_advantages"] else None,
        **shared_terms(trl) | other,
    )


def plan_of(case: Case) -> BatchPlan:
    return BatchPlan(2, GROUP, minibatches=1, iterations=1, accumulate=case.micro_batches, world_size=1)


def our_rollout(
    oracle: Oracle, module: PolicyGradient, case: Case, completions: Completions
) -> tuple[Rollout, Metrics]:
    """The rollout with the weights of then, and its metrics, as `take_rollout` makes them of these completions."""
    GIVEN.update(first=case.first, second=case.second)
    module.policy, module.reference_policy = oracle.model, oracle.trainer.ref_model
    oracle.at("rollout")
    prompts = PROMPTS[::GROUP]
    rows = list(range(len(prompts)))
    batch = PromptBatch(prompts, [MODEL.tokenizer.encode(p) for p in prompts], {}, rows, [0] * len(prompts))
    columns = {} if completions.episodes is None else {"episodes": [each.plain() for each in completions.episodes]}
    scored = Scored(batch, completions, module.reward_functions.score([""] * ROWS, [""] * ROWS, columns))
    with torch.no_grad():
        old = module.old_logprobs(completions) if module.needs_old_logprobs else None
        ref = module.reference_of(scored) if module.needs_reference else None
        return module.advantages(scored, old, ref)


def ours(oracle: Oracle, module: PolicyGradient, case: Case, completions: Completions) -> Outcome:
    """Our step: micro-batches and totals as `training_step` takes them."""
    rollout, recorded = our_rollout(oracle, module, case, completions)
    plan = plan_of(case)
    counts = step_counts(rollout, plan, seed=0, index=0)[0]
    oracle.at(case.now)
    shares, found = [], {name: [value(metric)] for name, metric in recorded.items()}
    for rows in rows_of_slots(rollout, plan, seed=0, index=0):
        micro = micro_batch(rollout, rows)
        loss, metrics = module.loss(micro, module.token_scores(micro.completions), step_totals(counts, plan))
        shares.append(loss)
        for name, metric in metrics.items():
            found.setdefault(name, []).append(value(metric))
    return replace(backward(oracle.model, shares), advantages=rollout.advantages, metrics=found)


def value(metric: Any) -> float:
    if isinstance(metric, Summed):
        return SUMMARIES[metric.summary](metric.sums).item()
    if isinstance(metric, (Highest, Lowest)):
        return metric.value.item()
    return (metric[0] / metric[1]).item()
