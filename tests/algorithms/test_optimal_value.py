"""A*-PO: the value of each prompt by hand, its regression's gradient as TRL computes it, and the stage before a run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from online_modules import completions, scores, with_policies
from small_rollouts import batch, trainer
from trl.experimental.a2po.a2po_trainer import A2POTrainer

from lit_rl.algorithms import Reinforce
from lit_rl.algorithms.rollouts.rollout_plan import BatchPlan, step_counts, step_totals
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.algorithms.terms.optimal_value import OptimalValue
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.ops.policy_losses import reinforce_loss
from lit_rl.ops.reductions import sequence_total

BETA = 0.05


def a2po(advantage: OptimalValue, **settings: Any) -> Reinforce:
    terms = {"loss": reinforce_loss, "reduction": sequence_total, "reward_beta": BETA}
    return Reinforce("tiny", graded, advantage=advantage, group_size=1, **terms, **settings)


def graded(completions: list[str]) -> list[float]:
    return [float(len(set(text)) % 3) for text in completions]


def test_values_by_hand():
    half = OptimalValue(samples=2, beta=0.5)
    half.learn({4: [0.0, 1.0], 7: [1.0, math.nan], 9: [math.nan, math.nan]})
    value = 0.5 * math.log((1 + math.exp(2)) / 2)
    found = half(torch.tensor([1.0, 0.0, 0.5, math.nan, 1.0]), torch.zeros(5), torch.tensor([4, 4, 7, 4, 9]))
    assert found.tolist() == pytest.approx([1 - value, -value, -0.5, 0, 0], abs=1e-6)
    for beta, limit in ((1e4, 0.5), (1e-3, 1.0)):
        other = OptimalValue(samples=2, beta=beta)
        other.learn({0: [0.0, 1.0]})
        assert other(torch.zeros(1), torch.zeros(1), torch.zeros(1)).item() == pytest.approx(-limit, abs=1e-3)


def test_the_gradient_is_that_of_trls_regression():
    rewards = [1.0, 0.0, 1.0, 0.5]
    values = OptimalValue(samples=2)
    values.learn({row: [0.0, float(row % 2)] for row in range(4)})
    module, drawn = with_policies(a2po(values)), completions([3, 1, 2, 3], 1)
    scored = Scored(batch(range(4)), drawn, scores(rewards))
    with torch.no_grad():
        _, rollout, _ = module.credited(scored)
    plan = BatchPlan(4, 1, minibatches=1, iterations=1, accumulate=1, world_size=1)
    totals = step_totals(step_counts(rollout, plan, seed=0, index=0)[0], plan)
    loss, _ = module.loss(rollout, module.token_scores(drawn), totals)
    ours = torch.autograd.grad(loss, list(module.policy.parameters()))

    theirs = SimpleNamespace(
        model=module.policy, model_kwarg_keys=(), args=SimpleNamespace(beta2=BETA),
        _metrics={mode: {"implicit_reward": [], "advantage": []} for mode in ("train", "eval")},
    )  # fmt: skip
    theirs._get_sequence_logps = lambda *asked: A2POTrainer._get_sequence_logps(theirs, *asked)
    inputs = {
        "input_ids": torch.cat([drawn.prompt_ids, drawn.response_ids], 1),
        "attention_mask": torch.cat([drawn.prompt_mask, drawn.response_mask], 1).long(),
        "logits_to_keep": drawn.response_ids.shape[1],
    }
    with torch.no_grad():
        ref = theirs._get_sequence_logps(module.reference_policy, *inputs.values())
    value = torch.tensor([0.5 * math.log((1 + math.exp(2 * (row % 2))) / 2) for row in range(4)])
    inputs |= {"ref_logps": ref, "rewards": torch.tensor(rewards), "v_star": value}
    regression = A2POTrainer.compute_loss(theirs, module.policy, inputs)
    gradient = torch.autograd.grad(regression, list(module.policy.parameters()))
    for mine, other in zip(ours, gradient, strict=True):
        torch.testing.assert_close(2 * BETA * mine, other, rtol=1e-4, atol=1e-6)


def test_values_are_of_every_training_row_by_the_initial_policy_in_any_batches(tmp_path):
    def learned(batch_size: int) -> dict[int, float]:
        module = a2po(OptimalValue(samples=3), sampling=Sampling(max_new_tokens=4))
        data = RolloutDataModule(
            task=Addition(max_operand=4, val_rows=2), prompts_per_rollout=4, val_batch_size=batch_size
        )
        trainer(tmp_path, max_steps=2).fit(module, datamodule=data)
        assert isinstance(module.advantage, OptimalValue)
        assert len(module.advantage.state()["values"]) == len(data.train_prompts)
        return module.advantage.state()["values"]

    values = learned(64)
    assert values == learned(5) and len(set(values.values())) > 1
