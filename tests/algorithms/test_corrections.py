"""Weights against an engine with weights of its own: when there are any, and that they cost no forward pass."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from composed_configs import tree_of
from copied_engines import CopiedPolicyGenerator
from small_rollouts import EachBatch, trainer

from lit_rl.algorithms import GRPO, PPO, RLOO, Constant, Evaluation, Reinforce
from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.cli.build import build
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.generation import Generator
from lit_rl.generation.hf import HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.ops import engine_mismatch, policy_losses, reductions
from lit_rl.ops.engine_mismatch import auto_correction
from lit_rl.rewards import exact_match

partial = functools.partial

OTHER: dict[str, Any] = {"generator": CopiedPolicyGenerator(torch.bfloat16)}
SAMPLING = Sampling(max_new_tokens=6)

FAMILY: dict[str, tuple[Any, dict[str, Any]]] = {
    "grpo": (GRPO, {}),
    "rloo": (RLOO, {"group_size": 4, "reward_beta": 0.0}),
    "reinforce": (Reinforce, {"group_size": 4, "reduction": reductions.sequence_mean}),
    "kl": (GRPO, {"beta": 0.3}),
    "vespo": (GRPO, {"loss": policy_losses.vespo_loss}),
    "off-policy": (GRPO, {"off_policy_threshold": 1e-4}),
}
CORRECTIONS = {
    "token_truncate": engine_mismatch.token_truncate,
    "sequence_mask": partial(engine_mismatch.sequence_mask, low=0.2),
}


def fitted(tmp_path: Any, algorithm: Any, settings: dict[str, Any], *, accumulate: int = 1, steps: int = 1) -> Any:
    """The module and the Trainer after one rollout of plain SGD steps at a rate of 1."""
    module = algorithm(
        "tiny",
        exact_match,
        **{
            "group_size": 4,
            "sampling": SAMPLING,
            "optimizer": ByPath("torch.optim.SGD", lr=1.0),
            "scheduler": Constant(),
            "evaluation": Evaluation(limit=1),
            "minibatches": steps,
            **OTHER,
            **settings,
        },
    )
    data = RolloutDataModule(task=Addition(max_operand=30, val_rows=4), prompts_per_rollout=8)
    kept = EachBatch(lambda m: m.rollout)
    run = trainer(tmp_path, max_steps=steps, accumulate_grad_batches=accumulate, callbacks=[kept])
    run.fit(module, datamodule=data)
    return module, {name: float(value) for name, value in run.callback_metrics.items()}, kept.seen[0]


def weights_after(module: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in module.policy.named_parameters()}


def with_the_pass(monkeypatch: Any) -> None:
    monkeypatch.setattr(PolicyGradient, "needs_old_logprobs", property(lambda self: True))


# ---------------------------------------------------------------------- when


@pytest.mark.parametrize("algorithm", [GRPO, RLOO, Reinforce, PPO])
def test_by_default_an_engine_of_its_own_is_corrected_and_the_policy_itself_is_not(algorithm):
    assert algorithm("tiny", len, **OTHER).engine_correction.correction is auto_correction
    for generator in (NativeGenerator(), HFGenerator(), None):
        assert algorithm("tiny", len, generator=generator).engine_correction.correction is None
    assert algorithm("tiny", len, correction=None, **OTHER).engine_correction.correction is None
    chosen = partial(engine_mismatch.token_mask, high=2.0)
    assert algorithm("tiny", len, correction=chosen).engine_correction.correction is chosen


def test_a_generator_that_says_nothing_is_exact():
    class Silent(Generator):
        def sync(self, policy, version):
            raise NotImplementedError

        def generate(self, prompts, sampling):
            raise NotImplementedError

    assert GRPO("tiny", len, generator=Silent()).engine_correction.correction is None


def test_the_automatic_one_is_truncated_importance_sampling_by_tokens():
    old, sampler = torch.tensor([[0.0, -1.0, 2.0]]), torch.tensor([[0.0, 0.0, 0.0]])
    weights = auto_correction(old, sampler, torch.ones(1, 3, dtype=torch.bool))
    torch.testing.assert_close(weights, torch.tensor([[1.0, math.exp(-1), 3.0]]))


@pytest.mark.parametrize("name", ["grpo", "ppo", "vespo"])
@pytest.mark.all
def test_every_preset_takes_it_and_none_switches_it_off(name):
    tree, off = (tree_of("run_dir=run", f"algo={name}", *more)["algo"] for more in ([], ["algo/correction=none"]))
    assert tree["correction"]["_target_"] == "lit_rl.ops.engine_mismatch.auto_correction"  # so config.yaml says it
    assert off["correction"] is None
    settings = {key: value for key, value in tree.items() if key != "generator"}
    made = build(settings | {"_partial_": True})
    assert getattr(made(**OTHER).engine_correction.correction, "func", None) is auto_correction
    assert made(generator=NativeGenerator()).engine_correction.correction is None


# ---------------------------------------------------------------------- the gradient, and what it costs


CUTS = [
    ("grpo", "token_truncate", 1),
    ("rloo", "sequence_mask", 1),
    ("reinforce", "token_truncate", 4),
    *((name, "token_truncate", 4) for name in ("kl", "vespo", "off-policy")),
]


@pytest.mark.parametrize(("name", "correction", "accumulate"), CUTS)
def test_without_the_extra_pass_gradient_and_metrics_are_the_same(tmp_path, monkeypatch, name, correction, accumulate):
    algorithm, settings = FAMILY[name]
    # All rows are computed: what is measured in the loss is of the rows that are.
    settings = {**settings, "correction": CORRECTIONS[correction], "skip_zero_advantages": False}
    module, logged, rollout = fitted(tmp_path, algorithm, settings, accumulate=accumulate)
    assert not module.needs_old_logprobs and rollout.old_logprobs is None and rollout.weights is None
    with_the_pass(monkeypatch)
    other, expected, taken = fitted(tmp_path, algorithm, settings, accumulate=accumulate)
    assert taken.old_logprobs is not None and float((taken.weights[taken.loss_mask] - 1).abs().max()) > 1e-3
    base = algorithm("tiny", exact_match, **settings)
    base.configure_model()
    start, mine, theirs = weights_after(base), weights_after(module), weights_after(other)
    change = max(float((theirs[name] - start[name]).norm()) for name in start)
    assert change > 1e-4
    assert max(float((mine[name] - theirs[name]).norm()) for name in start) <= 1e-5 * change + 1e-7
    names = {name for name in expected if name.startswith("train/")}
    assert names == {name for name in logged if name.startswith("train/")}
    assert {"train/sampling/ess", "train/sampling/kl", "train/sampling/truncated"} <= names
    for metric in names:
        assert logged[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6, nan_ok=True), metric


@pytest.mark.all
def test_weights_change_the_gradient(tmp_path):
    """The comparison above is no comparison of two runs without weights."""
    corrected, plain_ = (fitted(tmp_path, GRPO, {"correction": c})[0] for c in (engine_mismatch.token_truncate, None))
    differences = [
        float((a - b).norm()) for a, b in zip(weights_after(corrected).values(), weights_after(plain_).values())
    ]
    assert max(differences) > 1e-5


def forwards(tmp_path: Any, monkeypatch: Any, settings: dict[str, Any], **how: Any) -> tuple[int, int]:
    """Rows that the policy scored with and without gradient; the engine's copy is another model."""
    import lit_rl.algorithms.families.policy_gradient as policy_gradient
    import lit_rl.algorithms.rollouts.rollout_plan as micro_batches
    import lit_rl.algorithms.terms.token_weights as step_tokens

    rows = {True: 0, False: 0}

    def counting(score: Any) -> Any:
        def counted(model: Any, completions: Any, *args: Any, **keywords: Any) -> Any:
            rows[torch.is_grad_enabled()] += len(completions)
            return score(model, completions, *args, **keywords)

        return counted

    with monkeypatch.context() as patch:
        patch.setattr(micro_batches, "response_logprobs", counting(micro_batches.response_logprobs))
        for module in (policy_gradient, step_tokens):
            patch.setattr(module, "score", counting(module.score))
        fitted(tmp_path, GRPO, settings | {"skip_zero_advantages": False}, **how)
    return rows[True], rows[False]


@pytest.mark.all
def test_each_row_is_run_once_where_weights_are_all_that_is_made_of_old_logprobs(tmp_path, monkeypatch):
    assert forwards(tmp_path, monkeypatch, {}) == (32, 0)
    assert forwards(tmp_path, monkeypatch, {"correction": engine_mismatch.sequence_mask}, accumulate=4) == (32, 0)
    assert forwards(tmp_path, monkeypatch, {"generator": NativeGenerator()}) == (32, 0)


NEEDED = {
    "steps": ({}, 2),
    "rejection": (
        {"rejection": partial(engine_mismatch.reject_tokens, statistic=engine_mismatch.k3_statistic, high=0.02)},
        1,
    ),
    "weight-norm": ({"weight_norm": engine_mismatch.normalize_sequence_weights}, 1),
}


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.all
def test_where_another_term_needs_them_they_are_taken(tmp_path, monkeypatch, name):
    settings, steps = NEEDED[name]
    assert forwards(tmp_path, monkeypatch, settings, steps=steps) == (32, 32)


def test_a_kl_in_the_reward_needs_them():
    assert GRPO("tiny", len, reward_beta=0.1, **OTHER).needs_old_logprobs


# ---------------------------------------------------------------------- what is logged


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.all
def test_the_mismatch_is_logged_of_every_engine_of_its_own_corrected_or_not(tmp_path, steps):
    _, logged, rollout = fitted(tmp_path, GRPO, {"correction": None}, steps=steps, accumulate=2)
    assert 0 < logged["train/sampling/sampling_logp_difference/mean"] < 0.2
    assert logged["train/sampling/k3"] > 0 and "train/sampling/ess" not in logged
    assert rollout.weights is None
    _, logged, _ = fitted(tmp_path, GRPO, {"generator": NativeGenerator()}, steps=steps)
    assert not [name for name in logged if name.startswith("train/sampling/")]


# ---------------------------------------------------------------------- what may be sampled


class NoMass(CopiedPolicyGenerator):
    """As vLLM: its log-probs are of the truncated distribution, and it does not say how much was cut off."""

    reports_kept_mass = False


RESHAPED = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "bad_words": ["no"], "logit_bias": {5: 1.0}}


@pytest.mark.parametrize("setting", RESHAPED)
def test_what_reshapes_the_distribution_is_allowed_where_samples_are_weighted(setting):
    sampling = Sampling(**{setting: RESHAPED[setting]})  # pyright: ignore
    GRPO("tiny", len, generator=NoMass(), sampling=sampling)
    with pytest.raises(ConfigError, match=rf"sampling\.{setting}=.*algo/correction=token_truncate"):
        GRPO("tiny", len, generator=NoMass(), sampling=sampling, correction=None)


def test_weights_are_the_ratio_to_what_was_drawn_from(tmp_path):
    """The policy's own weights are in the engine, and a bias on some digits is all that differs: token by token."""
    sampling = Sampling(max_new_tokens=6, logit_bias=dict.fromkeys(range(15, 20), 4.0))
    settings = {"sampling": sampling, "generator": CopiedPolicyGenerator(), "minibatches": 2, "group_size": 4}
    module, _, rollout = fitted(tmp_path, GRPO, settings, steps=2)
    mask = rollout.loss_mask
    ratio = (rollout.old_logprobs - rollout.completions.sampler_logprobs).exp().clamp(max=3.0)
    torch.testing.assert_close(rollout.weights[mask], ratio[mask])
    assert float((ratio[mask] - 1).abs().max()) > 0.05  # the bias was in force, and no weight is 1 by chance
