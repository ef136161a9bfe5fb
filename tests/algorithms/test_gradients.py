"""The gradient of an optimizer step does not depend on how the step is cut into micro-batches."""

from __future__ import annotations

import dataclasses
import functools

import lightning as L
import pytest
import torch

from lit_rl.algorithms import GRPO, PPO, RLOO, Constant, Evaluation, Reinforce
from lit_rl.algorithms.controllers import AdaptiveEntropy, FixedEntropy
from lit_rl.algorithms.optimizers import ByPath
from lit_rl.data.datamodule import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.critic import SeparateCritic, SharedTrunk
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.lora import Lora
from lit_rl.ops import advantages, losses, mismatch, ratios, reductions, rejection, returns, selection, shaping
from lit_rl.ops.advantages import batch_normalized, centered
from lit_rl.ops.kl import corrected_k1, corrected_k2, k2, k3, sequence_corrected_k3
from lit_rl.ops.reductions import constant_mean, sequence_mean
from lit_rl.rewards import exact_match
from lit_rl.rollout import Completions, Prompts, Sampling

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

ALGORITHMS = {
    "grpo": (GRPO, {}),
    "grpo-kl": (GRPO, {"beta": 0.3}),
    "grpo-sequence": (GRPO, {"reduction": sequence_mean, "beta": 0.3}),
    "dr-grpo": (GRPO, {"reduction": partial(constant_mean, length=6), "advantage": centered}),
    "grpo-batch": (GRPO, {"advantage": batch_normalized}),
    "masked": (GRPO, {"mask_truncated": True, "sampling": Sampling(max_new_tokens=3)}),
    "rloo": (RLOO, {"group_size": 4}),
}

SEQUENCE = {"ratio": ratios.sequence_mean_ratio, "clip_low": 1e-3}
TWO_STEPS = {
    "clipped-delta": (GRPO, {"loss": partial(losses.clipped_policy_loss, clip_low=1e-3, delta=1.01)}),
    "gspo": (GRPO, {"loss": partial(losses.clipped_policy_loss, **SEQUENCE), "reduction": sequence_mean}),
    "gspo-token": (GRPO, {"loss": partial(losses.clipped_policy_loss, ratio=ratios.sequence_token_ratio)}),
    "luspo": (
        GRPO,
        {"loss": partial(losses.clipped_policy_loss, **SEQUENCE), "reduction": reductions.sequence_total},
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
    "cispo": (GRPO, {"loss": losses.cispo_loss}),
    "cispo-two-sided": (GRPO, {"loss": losses.cispo_two_sided_loss}),
    "sapo": (GRPO, {"loss": losses.sapo_loss}),
    "vespo": (GRPO, {"loss": losses.vespo_loss, "correction": mismatch.token_truncate, **OTHER}),
    "gmpo": (GRPO, {"loss": losses.gmpo_loss, "reduction": sequence_mean}),
    "dppo-tv": (GRPO, {"loss": partial(losses.dppo_tv_loss, threshold_low=1e-3)}),
    "dppo-kl": (GRPO, {"loss": partial(losses.dppo_kl_loss, threshold_low=1e-5)}),
    "prime-rl": (GRPO, {"loss": losses.prime_rl_loss}),
    "up-grpo": (GRPO, {"loss": losses.up_grpo_loss}),
    "kl-cov": (GRPO, {"loss": partial(losses.kl_cov_loss, share=0.2)}),
    "cpgd": (GRPO, {"loss": losses.cpgd_loss, "advantage": advantages.cpgd}),
    "gpg": (GRPO, {"loss": losses.reinforce_loss, "advantage": advantages.gpg}),
    "opo": (GRPO, {"loss": losses.importance_weighted_loss, "advantage": advantages.opo}),
    "gdpo": (GRPO, {"advantage": advantages.normalize_then_sum}),
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
        {"correction": mismatch.token_truncate, "weight_norm": mismatch.normalize_token_weights, **OTHER},
    ),
    "sequence-weights": (
        GRPO,
        {"correction": mismatch.sequence_mask, "weight_norm": mismatch.normalize_sequence_weights, **OTHER},
    ),
    "rejection": (
        GRPO,
        {"rejection": partial(rejection.reject_tokens, statistic=rejection.k3_statistic, high=0.02), **OTHER},
    ),
    "whitened": (RLOO, {"group_size": 4, "whitening": advantages.whiten_rows}),
    "shaped": (GRPO, {"shaping": shaping.relative_length_penalty, "reward_clip": (-1, 0.8), "advantage_clip": 0.5}),
    "reinforce": (Reinforce, {"reward_beta": 0.1}),
    "reinforce-baseline": (Reinforce, {"advantage": returns.reinforce_plus_plus_baseline, "group_size": 4}),
    "remax": (Reinforce, {"advantage": advantages.remax}),
    "ppo": (PPO, {"critic": SeparateCritic(), "vf_coef": 1.0, "iterations": 1, "group_size": 4}),
    "ppo-shared": (PPO, {"critic": SharedTrunk(), "vf_coef": 1.0, "iterations": 1}),
}
"""Run over two optimizer steps of one rollout, so that ratios differ from 1 in the second."""


def change_of_weights(
    tmp_path, algorithm, settings, *, accumulate=1, split_groups=1, steps=1, lr=1.0
) -> dict[str, torch.Tensor]:
    """Plain SGD steps: the change of a weight is minus its gradient times the learning rate."""
    if "entropy" in settings:  # it holds a state: one for each run
        settings = {**settings, "entropy": settings["entropy"]()}
    module = algorithm(
        "tiny",
        exact_match,
        **{
            "group_size": 4,
            "sampling": Sampling(max_new_tokens=6),
            "optimizer": ByPath("torch.optim.SGD", lr=lr),
            "scheduler": Constant(),
            "evaluation": Evaluation(limit=1),
            "minibatches": steps,
            **settings,
            "split_groups": split_groups,
        },
    )
    module.configure_model()
    before = {name: weight.detach().clone() for name, weight in module.named_parameters() if weight.requires_grad}
    data = RolloutDataModule(task=Addition(max_operand=9, val_rows=4), prompts_per_rollout=8)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=steps, accumulate_grad_batches=accumulate, default_root_dir=tmp_path, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    after = dict(module.named_parameters())
    return {name: after[name].detach() - weight for name, weight in before.items()}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_accumulation_changes_nothing(name, tmp_path):
    whole = change_of_weights(tmp_path, *ALGORITHMS[name])
    assert max(change.abs().max() for change in whole.values()) > 1e-4
    for accumulate, split in [(2, 1), (8, 1), (8, 2)]:
        cut = change_of_weights(tmp_path, *ALGORITHMS[name], accumulate=accumulate, split_groups=split)
        for key, change in whole.items():
            assert (change - cut[key]).norm() <= 2e-5 * change.norm() + 1e-7, (key, accumulate, split)


@pytest.mark.parametrize("name", TWO_STEPS)
def test_accumulation_changes_nothing_off_policy(name, tmp_path):
    algorithm, settings = TWO_STEPS[name]
    whole = change_of_weights(tmp_path, algorithm, settings, steps=2, lr=0.05)
    assert max(change.abs().max() for change in whole.values()) > 1e-5
    group = settings.get("group_size", 1 if algorithm in (Reinforce, PPO) else 4)
    cut = change_of_weights(
        tmp_path, algorithm, settings, steps=2, lr=0.05, accumulate=4, split_groups=2 if group > 1 else 1
    )
    for key, change in whole.items():
        assert (change - cut[key]).norm() <= 1e-4 * change.norm() + 1e-7, key


def test_the_mean_over_a_micro_batch_depends_on_the_cut(tmp_path):
    """bnpo is defined that way; `docs/algorithms/bnpo.md` says so."""
    settings = {"reduction": reductions.local_token_mean, "sampling": Sampling(max_new_tokens=6)}
    whole = change_of_weights(tmp_path, GRPO, settings)
    cut = change_of_weights(tmp_path, GRPO, settings, accumulate=8)
    assert any((change - cut[key]).norm() > 1e-3 * change.norm() for key, change in whole.items())


def test_grpo_at_ratio_one_is_reinforce_with_group_baselines(tmp_path):
    """Hand-made: mean over tokens of -A log pi, on the same rollout."""
    change = change_of_weights(tmp_path, GRPO, {})
    module = GRPO("tiny", exact_match, group_size=4, sampling=Sampling(max_new_tokens=6))
    module.configure_model()
    data = RolloutDataModule(task=Addition(max_operand=9, val_rows=4), prompts_per_rollout=8)
    data.prepare(module.tokenizer)
    batch = data._prepared().train.batch(data._order(True).epoch(0)[:8])
    with module.rollout_context():
        completions = module.generate(batch)
        scores = module.reward(batch, completions)
    advantages = torch.cat([(g - g.mean()) / (g.std() + 1e-4) for g in scores.total.split(4)])
    module.policy.train()
    loss, tokens = torch.zeros(()), int(completions.response_mask.sum())
    for i in range(32):
        length = int(completions.lengths[i])
        prompt = completions.prompt_ids[i][completions.prompt_mask[i]]
        ids = torch.cat([prompt, completions.response_ids[i, :length]])
        logprobs = module.policy(input_ids=ids[None]).logits[0].log_softmax(-1)
        taken = logprobs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None]).sum()
        loss = loss - advantages[i] * taken / tokens
    loss.backward()
    for name, weight in module.policy.named_parameters():
        gradient = weight.grad if weight.grad is not None else torch.zeros_like(weight)
        # gradient_clip_val is off in the Trainer above, so the step is the gradient
        assert (change[f"policy.{name}"] + gradient).norm() <= 2e-4 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("lora", [None, Lora(r=4)], ids=["full", "lora"])
@pytest.mark.parametrize("algorithm", [GRPO, RLOO])
def test_at_the_first_step_ratio_is_one_and_kl_is_zero(algorithm, lora, tmp_path):
    module = algorithm(
        LanguageModel("tiny", lora=lora), exact_match, beta=0.1, reward_beta=0.1, iterations=2, group_size=4,
        sampling=Sampling(max_new_tokens=6, temperature=0.7), evaluation=Evaluation(limit=1),
    )  # fmt: skip
    seen = []

    class First(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            seen.append({name: (num / den).item() for name, (num, den) in pl_module._records.averages.sums.items()})
            trainer.should_stop = True

    trainer = L.Trainer(
        accelerator="cpu", max_steps=2, default_root_dir=tmp_path, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, callbacks=[First()],
    )  # fmt: skip
    trainer.fit(module, datamodule=RolloutDataModule(task=Addition(max_operand=9, val_rows=4), prompts_per_rollout=8))
    assert seen[0]["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert seen[0]["approx_kl"] == pytest.approx(0.0, abs=1e-8)
    assert seen[0]["kl"] == pytest.approx(0.0, abs=1e-5)


def test_no_reference_is_loaded_without_a_term_that_needs_it():
    module = GRPO("tiny", exact_match)
    module.configure_model()
    assert module.reference_policy is None
    module = GRPO("tiny", exact_match, beta=0.1)
    module.configure_model()
    assert module.reference_policy is not None
