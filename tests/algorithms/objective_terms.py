"""Every loss and every term of an objective, one at a time, for the tests that cut an optimizer step into parts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from lit_rl.algorithms import GRPO, PPO, RLOO, Reinforce
from lit_rl.algorithms.terms.regularizers import AdaptiveEntropy, FixedEntropy
from lit_rl.algorithms.terms.self_teacher import ColumnContext, SelfTeacher
from lit_rl.algorithms.terms.teachers import TeacherAdvantage, TopDivergence
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.critics import SeparateCritic, SharedTrunk
from lit_rl.ops import advantages, engine_mismatch, policy_losses, reductions, returns, selection
from lit_rl.ops import advantages as shaping
from lit_rl.ops import returns as turns
from lit_rl.ops.kl import corrected_k1, corrected_k2, k2, k3, sequence_corrected_k3
from lit_rl.ops.reductions import sequence_mean

partial = functools.partial


class EngineWithOtherLogprobs(NativeGenerator):
    """Stands in for an engine in another precision: it samples like the native one and reports slightly other
    log-probs, which depend on the token and its position only."""

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        completions = super().generate(prompts, sampling)
        position = torch.arange(completions.response_ids.shape[1])
        error = 0.3 * torch.sin(completions.response_ids * 12.9898 + position * 78.233)
        off = (completions.sampler_logprobs + error).masked_fill(~completions.response_mask, 0.0)
        return dataclasses.replace(completions, sampler_logprobs=off)


OTHER = {"generator": EngineWithOtherLogprobs()}
ITSELF = SelfTeacher(ColumnContext("answer", template="$context+0="), "live")
"""A teacher that knows the answer, in words that the shipped policy reads."""

SEQUENCE = {"ratio": policy_losses.sequence_mean_ratio, "clip_low": 1e-3}
TWO_STEPS = {
    "clipped-delta": (GRPO, {"loss": partial(policy_losses.clipped_policy_loss, clip_low=1e-3, delta=1.01)}),
    "gspo": (GRPO, {"loss": partial(policy_losses.clipped_policy_loss, **SEQUENCE), "reduction": sequence_mean}),
    "gspo-token": (
        GRPO,
        {"loss": partial(policy_losses.clipped_policy_loss, ratio=policy_losses.sequence_token_ratio)},
    ),
    "luspo": (
        GRPO,
        {"loss": partial(policy_losses.clipped_policy_loss, **SEQUENCE), "reduction": reductions.sequence_total},
    ),
    "token-sum": (GRPO, {"reduction": lambda *args: reductions.token_sum(*args) / 100}),
    "unmasked": (
        GRPO,
        {
            "reduction": reductions.unmasked_sequence_mean,
            "mask_truncated": True,
            "sampling": Sampling(max_new_tokens=3),
        },
    ),
    "cispo": (GRPO, {"loss": policy_losses.cispo_loss}),
    "cispo-two-sided": (GRPO, {"loss": policy_losses.cispo_two_sided_loss}),
    "sapo": (GRPO, {"loss": policy_losses.sapo_loss}),
    "vespo": (GRPO, {"loss": policy_losses.vespo_loss, "correction": engine_mismatch.token_truncate, **OTHER}),
    "gmpo": (GRPO, {"loss": policy_losses.gmpo_loss, "reduction": sequence_mean}),
    "dppo-tv": (GRPO, {"loss": partial(policy_losses.dppo_tv_loss, threshold_low=1e-3)}),
    "dppo-kl": (GRPO, {"loss": partial(policy_losses.dppo_kl_loss, threshold_low=1e-5)}),
    "prime-rl": (GRPO, {"loss": policy_losses.prime_rl_loss}),
    "up-grpo": (GRPO, {"loss": policy_losses.up_grpo_loss}),
    "kl-cov": (GRPO, {"loss": partial(policy_losses.kl_cov_loss, share=0.2)}),
    "real": (GRPO, {"loss": policy_losses.real_loss, "reduction": sequence_mean}),
    "dro": (GRPO, {"loss": policy_losses.dro_loss}),
    "fipo": (GRPO, {"loss": partial(policy_losses.fipo_loss, weight_range=(0.5, 2.0))}),
    "m2po": (GRPO, {"loss": partial(policy_losses.m2po_loss, threshold=1e-4)}),
    "cpgd": (GRPO, {"loss": policy_losses.cpgd_loss, "advantage": advantages.cpgd}),
    "gpg": (GRPO, {"loss": policy_losses.reinforce_loss, "advantage": advantages.gpg}),
    "opo": (GRPO, {"loss": policy_losses.importance_weighted_loss, "advantage": advantages.opo}),
    "otb": (GRPO, {"loss": policy_losses.reinforce_loss, "advantage": returns.optimal_token_baseline}),
    "taught-advantage": (GRPO, {"teacher": ITSELF, "distillation": TeacherAdvantage(0.5)}),
    "taught-top": (
        GRPO,
        {
            "teacher": ITSELF,
            "distillation": TopDivergence(top_k=20, ratio_clip=1.05),
            "advantage": advantages.no_advantage,
        },
    ),
    "gdpo": (GRPO, {"advantage": advantages.normalize_then_sum}),
    "gigpo": (GRPO, {"advantage": turns.gigpo}),
    "process": (GRPO, {"advantage": returns.process_supervised}),
    "kl-corrected-k1": (GRPO, {"beta": 0.3, "kl": corrected_k1}),
    "kl-corrected-k2": (GRPO, {"beta": 0.3, "kl": corrected_k2}),
    "kl-sequence-k3": (GRPO, {"beta": 0.3, "kl": sequence_corrected_k3}),
    "kl-in-reward": (GRPO, {"reward_beta": 0.3, "reward_kl": k2}),
    "kl-in-both": (GRPO, {"beta": 0.3, "kl": k3, "reward_beta": 0.3}),
    "entropy-bonus": (GRPO, {"entropy": partial(FixedEntropy, 0.1)}),
    "entropy-adaptive": (GRPO, {"entropy": partial(AdaptiveEntropy, coef=0.1, delta=0.05, target=10.0)}),
    "top-entropy": (GRPO, {"selection": partial(selection.top_entropy, share=0.3)}),
    "top-entropy-and-bonus": (
        GRPO,
        {"selection": partial(selection.top_entropy, share=0.3), "entropy": partial(FixedEntropy, 0.1)},
    ),
    "top-entropy-per-sequence-and-bonus": (
        GRPO,
        {"selection": partial(selection.top_entropy_per_sequence, share=0.3), "entropy": partial(FixedEntropy, 0.1)},
    ),
    "off-policy-mask": (GRPO, {"off_policy_threshold": 1e-3}),
    "weights": (
        GRPO,
        {"correction": engine_mismatch.token_truncate, "weight_norm": engine_mismatch.normalize_token_weights, **OTHER},
    ),
    "sequence-weights": (
        GRPO,
        {
            "correction": engine_mismatch.sequence_mask,
            "weight_norm": engine_mismatch.normalize_sequence_weights,
            **OTHER,
        },
    ),
    "rejection": (
        GRPO,
        {
            "rejection": partial(engine_mismatch.reject_tokens, statistic=engine_mismatch.k3_statistic, high=0.02),
            **OTHER,
        },
    ),
    "maxrl": (GRPO, {"advantage": advantages.maxrl}),
    "pass-at-k": (GRPO, {"advantage": advantages.pass_at_k}),
    "lite-ppo": (GRPO, {"advantage": advantages.batch_normalized}),
    "unmasked-constant": (
        GRPO,
        {"reduction": partial(reductions.unmasked_constant_mean, length=6), "mask_truncated": True},
    ),
    "whitened": (RLOO, {"group_size": 4, "whitening": advantages.whiten_rows}),
    "shaped": (GRPO, {"shaping": shaping.relative_length_penalty, "reward_clip": (-1, 0.8), "advantage_clip": 0.5}),
    "reinforce": (Reinforce, {"reward_beta": 0.1}),
    "reinforce-baseline": (Reinforce, {"advantage": returns.reinforce_plus_plus_baseline, "group_size": 4}),
    "remax": (Reinforce, {"advantage": advantages.remax}),
    "ppo": (PPO, {"critic": SeparateCritic(), "vf_coef": 1.0, "iterations": 1, "group_size": 4}),
    "turn-ppo": (PPO, {"advantage": turns.gae_of_turns, "vf_coef": 1.0, "iterations": 1}),
    "ppo-shared": (PPO, {"critic": SharedTrunk(), "vf_coef": 1.0, "iterations": 1}),
}
"""Run over two optimizer steps of one rollout, so that ratios differ from 1 in the second."""


def fresh(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings for one run: what holds a state is made anew."""
    return {**settings, "entropy": settings["entropy"]()} if "entropy" in settings else settings
