"""The gradient of an optimizer step does not depend on how the step is cut into micro-batches."""

from __future__ import annotations

import functools

import lightning as L
import pytest
import torch
from objective_terms import TWO_STEPS, fresh
from small_rollouts import trainer as quiet_trainer
from tiers import in_turn, quick

from lit_rl.algorithms import GRPO, RLOO, Constant, Evaluation
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.models.adapters import Lora
from lit_rl.models.language_model import LanguageModel
from lit_rl.ops import reductions
from lit_rl.ops.advantages import batch_normalized, centered
from lit_rl.ops.reductions import constant_mean, sequence_mean
from lit_rl.rewards import exact_match

partial = functools.partial


ALGORITHMS = {
    "grpo": (GRPO, {}),
    "grpo-kl": (GRPO, {"beta": 0.3}),
    "grpo-sequence": (GRPO, {"reduction": sequence_mean, "beta": 0.3}),
    "dr-grpo": (GRPO, {"reduction": partial(constant_mean, length=6), "advantage": centered}),
    "grpo-batch": (GRPO, {"advantage": batch_normalized}),
    "masked": (GRPO, {"mask_truncated": True, "sampling": Sampling(max_new_tokens=3)}),
    "rloo": (RLOO, {"group_size": 4}),
}


def change_of_weights(
    tmp_path, algorithm, settings, *, accumulate=1, split_groups=1, steps=1, lr=1.0, reward=exact_match
) -> dict[str, torch.Tensor]:
    """Plain SGD steps: the change of a weight is minus its gradient times the learning rate."""
    module = algorithm(
        "tiny",
        reward,
        **{
            "group_size": 4,
            "sampling": Sampling(max_new_tokens=6),
            "optimizer": ByPath("torch.optim.SGD", lr=lr),
            "scheduler": Constant(),
            "evaluation": Evaluation(limit=1),
            "minibatches": steps,
            **fresh(settings),
            "split_groups": split_groups,
        },
    )
    module.configure_model()
    before = {name: weight.detach().clone() for name, weight in module.named_parameters() if weight.requires_grad}
    data = RolloutDataModule(task=Addition(max_operand=9, val_rows=4), prompts_per_rollout=8)
    trainer = quiet_trainer(tmp_path, max_steps=steps, accumulate_grad_batches=accumulate)
    trainer.fit(module, datamodule=data)
    after = dict(module.named_parameters())
    return {name: after[name].detach() - weight for name, weight in before.items()}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_accumulation_changes_nothing(name, tmp_path):
    whole = change_of_weights(tmp_path, *ALGORITHMS[name])
    assert max(change.abs().max() for change in whole.values()) > 1e-4
    for accumulate, split in [*([(2, 1)] if name == "grpo" else []), (8, 2)]:
        cut = change_of_weights(tmp_path, *ALGORITHMS[name], accumulate=accumulate, split_groups=split)
        for key, change in whole.items():
            assert (change - cut[key]).norm() <= 2e-5 * change.norm() + 1e-7, (key, accumulate, split)


QUICK = {
    "gspo",
    "token-sum",
    "gmpo",
    "kl-cov",
    "kl-in-both",
    "entropy-bonus",
    "weights",
    "rejection",
    "whitened",
    "ppo",
}
"""One of each kind: losses of sequences and of tokens, a term of the batch, KL, entropy, weights, a critic."""


COUPLED = {
    "clipped-delta",  # a loss of tokens alone: the others of this kind have their laws in tests/ops
    "gspo-token",
    "luspo",
    "unmasked",
    "vespo",
    "dppo-kl",
    "up-grpo",
    "fipo",
    "m2po",
    "cpgd",
    "gigpo",
    "process",
    "kl-sequence-k3",
    "kl-in-reward",
    "entropy-adaptive",
    "top-entropy-per-sequence-and-bonus",
    "off-policy-mask",
    "sequence-weights",
    "unmasked-constant",
    "shaped",
    "reinforce-baseline",
    "remax",
    "turn-ppo",
    "ppo-shared",
}
"""Those whose loss has a denominator, a sum or a column that no other of `QUICK` has."""


@pytest.mark.parametrize("name", quick([name for name in TWO_STEPS if name in QUICK | COUPLED], QUICK))
def test_accumulation_changes_nothing_off_policy(name, tmp_path):
    algorithm, settings = TWO_STEPS[name]
    whole = change_of_weights(tmp_path, algorithm, settings, steps=2, lr=0.05)
    assert max(change.abs().max() for change in whole.values()) > 1e-5
    cut = change_of_weights(tmp_path, algorithm, settings, steps=2, lr=0.05, accumulate=8, split_groups=2)
    for key, change in whole.items():
        assert (change - cut[key]).norm() <= 1e-4 * change.norm() + 1e-7, key


def test_a_loss_that_compares_completions_is_given_whole_groups_and_told_their_prompts(tmp_path):
    algorithm, settings = TWO_STEPS["real"]
    how = {"steps": 2, "lr": 0.05, "reward": odd}  # which differ within nearly every group
    whole = change_of_weights(tmp_path, algorithm, settings, **how)
    assert max(change.abs().max() for change in whole.values()) > 1e-5
    cut = change_of_weights(tmp_path, algorithm, settings, **how, accumulate=4)
    for key, change in whole.items():
        assert (change - cut[key]).norm() <= 1e-4 * change.norm() + 1e-7, key


def odd(completions: list[str]) -> list[float]:
    return [float(int(completion[-1:].isdigit() and int(completion[-1]) % 2)) for completion in completions]


@in_turn(name=["grpo", "grpo-sequence", "dr-grpo", "masked", "rloo"], accumulate=[1, 8])
def test_rows_without_an_advantage_are_left_out_and_change_nothing(name, accumulate, tmp_path):
    algorithm, settings = ALGORITHMS[name]
    settings = {name: value for name, value in settings.items() if name != "beta"}
    computed = []

    class Counted(algorithm):
        def token_scores(self, completions):
            computed.append(len(completions))
            return super().token_scores(completions)

    whole = change_of_weights(tmp_path, Counted, settings | {"skip_zero_advantages": False}, accumulate=accumulate)
    assert sum(computed) == 32 and max(change.abs().max() for change in whole.values()) > 1e-4
    computed.clear()
    skipped = change_of_weights(tmp_path, Counted, settings, accumulate=accumulate)
    assert accumulate <= sum(computed) < 32 and len(computed) == accumulate
    for key, change in whole.items():
        assert (change - skipped[key]).norm() <= 2e-5 * change.norm() + 1e-7, key


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
    batch = data.sets.train.batch(data.order(True).epoch(0)[:8])
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


@in_turn(algorithm=[GRPO, RLOO], lora=[None, Lora(r=4)])
def test_at_the_first_step_ratio_is_one_and_kl_is_zero(algorithm, lora, tmp_path):
    module = algorithm(
        LanguageModel("tiny", lora=lora), exact_match, beta=0.1, reward_beta=0.1, iterations=2, group_size=4,
        sampling=Sampling(max_new_tokens=6, temperature=0.7), evaluation=Evaluation(limit=1),
    )  # fmt: skip
    seen = []

    class First(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            means = pl_module._records.averages.state()["means"]
            seen.append({name: (num / den).item() for name, (num, den) in means.items()})
            trainer.should_stop = True

    trainer = quiet_trainer(tmp_path, max_steps=2, callbacks=[First()])
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
