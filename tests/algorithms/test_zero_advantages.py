"""Rows are left out of the forward pass only where no gradient can come from them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from online_modules import completions

from lit_rl.algorithms import GRPO, PPO
from lit_rl.algorithms.checks.policy_gradient_checks import can_skip_zero_advantages
from lit_rl.algorithms.terms.regularizers import FixedEntropy
from lit_rl.core.rollout import Rollout
from lit_rl.ops.policy_losses import (
    clipped_policy_loss,
    kl_cov_loss,
    prime_rl_loss,
    reinforce_loss,
)
from lit_rl.ops.reductions import (
    local_token_mean,
    token_mean,
)
from lit_rl.ops.selection import top_entropy_per_sequence
from lit_rl.ops.traits import PolicyLossTraits, ReductionTraits


def test_a_denominator_of_the_micro_batch_counts_every_row() -> None:
    assert not can_skip_zero_advantages(clipped_policy_loss, local_token_mean)


def test_of_functions_that_declare_nothing_nothing_is_known() -> None:
    def loss(logprobs, old_logprobs, advantages, mask):
        return -logprobs * advantages[:, None], {}

    def mean(per_token, mask, totals):
        return per_token.sum() / totals.tokens

    assert not can_skip_zero_advantages(loss, token_mean) and not can_skip_zero_advantages(reinforce_loss, mean)

    loss, mean = PolicyLossTraits(zero_without_advantage=True)(loss), ReductionTraits(adds_rows=True)(mean)
    assert can_skip_zero_advantages(loss, token_mean) and can_skip_zero_advantages(reinforce_loss, mean)


def test_a_penalty_of_every_token_that_weighs_nothing_is_none():
    assert can_skip_zero_advantages(partial(prime_rl_loss, kl_tau=0.0), token_mean)
    assert not can_skip_zero_advantages(partial(prime_rl_loss, kl_tau=0.1), token_mean)


def rollout_with(advantages: torch.Tensor, loss_mask: torch.Tensor | None = None) -> Rollout:
    drawn = completions([3, 1, 2, 2], 2)
    mask = drawn.response_mask if loss_mask is None else loss_mask
    return Rollout(drawn, rewards=torch.zeros(4), advantages=advantages, loss_mask=mask)


def test_a_row_teaches_that_has_an_advantage_at_a_loss_token() -> None:
    module = GRPO("tiny", len)
    of_rows = rollout_with(torch.tensor([1.0, -0.5, 0.0, 2.0]))
    teaching = module.rows_that_teach(of_rows)
    assert teaching is not None and teaching.tolist() == [True, True, False, True]

    of_tokens = torch.zeros(4, 3)
    of_tokens[1, 0], of_tokens[2, 2] = 1.0, 1.0  # the second stands outside the completion, which has two tokens
    teaching = module.rows_that_teach(rollout_with(of_tokens))
    assert teaching is not None and teaching.tolist() == [False, True, False, False]

    masked = of_rows.loss_mask.clone()
    masked[0] = False
    teaching = module.rows_that_teach(rollout_with(torch.tensor([1.0, -0.5, 0.0, 2.0]), masked))
    assert teaching is not None and teaching.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1},
        {"entropy": FixedEntropy(0.01)},
        {"router_aux_loss_coef": 0.1},
        {"selection": partial(top_entropy_per_sequence, share=0.5)},
        {"loss": kl_cov_loss, "reduction": token_mean},
        {"reduction": local_token_mean},
        {"skip_zero_advantages": False},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_where_another_term_learns_from_a_row_it_is_computed(settings: dict[str, Any]) -> None:
    assert GRPO("tiny", len, **settings).rows_that_teach(rollout_with(torch.zeros(4))) is None


def test_a_critic_learns_from_every_row() -> None:
    assert PPO("tiny", len).rows_that_teach(rollout_with(torch.zeros(4, 3))) is None
