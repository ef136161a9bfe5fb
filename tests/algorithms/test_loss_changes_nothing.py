"""`loss` of every on-policy method is a function: called again it says the same, and nothing of the module changed.

It reads no padding, and its gradient is the same again on several threads (`loss_laws`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from copied_engines import CopiedPolicyGenerator
from held_state import same, state_of
from loss_laws import AddsInOneOrder, padding_is_not_read
from small_rollouts import trainer

import lit_rl.algorithms
from lit_rl.algorithms import GRPO, PPO, RLOO, XPO, AdamW, Constant, NashMD, OnlineDPO, Reinforce
from lit_rl.algorithms.loop.on_policy import OnPolicyModule
from lit_rl.algorithms.terms.credit import RunningNorm
from lit_rl.algorithms.terms.groups import DynamicSampling, GroupReplay
from lit_rl.algorithms.terms.regularizers import AdaptiveEntropy, AdaptiveKL
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.models.critics import SharedTrunk
from lit_rl.models.references import EMA
from lit_rl.ops import engine_mismatch, policy_losses, returns, selection

STATEFUL = {"kl_control", "reward_norm", "entropy", "groups", "replay"}
"""Every term of a policy gradient that a checkpoint holds a state of."""


def stateful() -> dict[str, Any]:
    """Settings in which each of these terms has something to change."""
    return {
        "beta": 0.1,
        "reward_beta": 0.1,
        "reference": EMA(0.9),
        "kl_control": AdaptiveKL(target=0.01, horizon=100),
        "reward_norm": RunningNorm(),
        "entropy": AdaptiveEntropy(coef=0.1, delta=0.05, target=10.0),
        "groups": DynamicSampling(max_draws=4),
        "replay": GroupReplay(),
    }


def weighted() -> dict[str, Any]:
    """Settings of an engine that samples from a slightly other policy."""
    return {
        "generator": CopiedPolicyGenerator(torch.bfloat16),
        "correction": engine_mismatch.token_truncate,
        "rejection": partial(engine_mismatch.reject_tokens, statistic=engine_mismatch.k3_statistic, high=0.02),
        "weight_norm": engine_mismatch.normalize_token_weights,
        "selection": partial(selection.top_entropy, share=0.5),
        "off_policy_threshold": 1e-3,
    }


METHODS: dict[str, Any] = {
    "grpo": partial(GRPO, minibatches=2),
    "grpo-of-all-terms": lambda *args, **more: GRPO(*args, minibatches=2, **stateful(), **weighted(), **more),
    # One step a rollout: the weights against the engine are made in the loss.
    "grpo-weighted-in-loss": lambda *args, **more: GRPO(*args, generator=weighted()["generator"], **more),
    "grpo-of-the-step": partial(GRPO, minibatches=2, loss=partial(policy_losses.kl_cov_loss, share=0.2)),
    "rloo": partial(RLOO, minibatches=2, reward_beta=0.1),
    "reinforce": partial(Reinforce, minibatches=2, advantage=returns.reinforce_plus_plus_baseline, reward_beta=0.1),
    "ppo": partial(PPO, iterations=2, critic_warmup=1, beta=0.1),
    "ppo-shared-trunk": lambda *args, **more: PPO(*args, iterations=2, critic=SharedTrunk(), **more),
    "ppo-of-all-stateful-terms": lambda *args, **more: PPO(*args, iterations=2, **stateful(), **more),
    "online_dpo": lambda *args, **more: OnlineDPO(*args, minibatches=2, reference=EMA(0.9), **more),
    "xpo": partial(XPO, minibatches=2, alpha=0.1, group_size=2),
    "nash_md": partial(NashMD, minibatches=2, group_size=2),
}


def varied(completions: list[str]) -> list[float]:
    """Any policy gets different rewards within most groups, and no reward for some completions."""
    numbers = [sum(map(ord, text)) % 7 for text in completions]
    return [float(number) if number else None for number in numbers]  # pyright: ignore


def made(name: str) -> OnPolicyModule:
    return METHODS[name](
        "tiny",
        varied,
        **{
            "sampling": Sampling(max_new_tokens=5),
            "optimizer": AdamW(lr=1e-3),
            "scheduler": Constant(),
            **({} if name in ("xpo", "nash_md") else {"group_size": 4}),
        },
    )


def fit(module: OnPolicyModule, folder: Any, rollouts: int = 2) -> None:
    data = RolloutDataModule(task=Addition(max_operand=9, val_rows=4), prompts_per_rollout=8)
    steps = rollouts * module.minibatches * module.iterations
    trainer(folder, max_steps=steps, accumulate_grad_batches=2).fit(module, datamodule=data)


def test_every_on_policy_method_is_here() -> None:
    methods = {value for value in vars(lit_rl.algorithms).values() if isinstance(value, type)}
    on_policy = {method for method in methods if issubclass(method, OnPolicyModule)}
    assert {type(made(name)) for name in METHODS} == on_policy


@pytest.mark.parametrize("name", METHODS)
def test_loss_twice_changes_no_state(name: str, tmp_path: Any) -> None:
    """At every micro-batch of a run: the first of a step and the last, of a first rollout and a second."""
    module = made(name)
    loss, learned = module.loss, []

    def twice(*given: Any) -> Any:
        before, saved, arguments = state_of(module), state_of(module.rank_state()), state_of(given)
        (first, metrics), (again, also) = loss(*given), loss(*given)
        same(before, state_of(module))
        same(saved, state_of(module.rank_state()), "rank_state")
        same(arguments, state_of(given), "arguments")
        same(first.detach(), again.detach(), "loss")
        same(state_of(metrics), state_of(also), "metrics")
        padding_is_not_read(loss, *given)
        scores = given[1].logprobs
        learned.append(bool(torch.autograd.grad(first, scores, retain_graph=True, allow_unused=True)[0].any()))
        return first, metrics

    module.loss = twice  # pyright: ignore
    with AddsInOneOrder():
        fit(module, tmp_path)
    assert len(learned) == 2 * 2 * module.minibatches * module.iterations
    assert sum(learned) >= len(learned) / 2, "next to nothing is learned"


@pytest.mark.parametrize("name", ["grpo-of-all-terms", "ppo-of-all-stateful-terms"])
def test_the_run_changes_the_state_of_every_term(name: str, tmp_path: Any) -> None:
    """What `loss` leaves alone does change: between micro-batches, where a rollout is taken or a step is done."""
    module = made(name)
    terms = module.rank_state()["terms"]
    assert terms.keys() == STATEFUL == set(module._stateful())  # pyright: ignore
    before = state_of(terms)
    fit(module, tmp_path)
    after = state_of(module.rank_state()["terms"])
    for term in STATEFUL:
        with pytest.raises(AssertionError):
            same(before[term], after[term])
