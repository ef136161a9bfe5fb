"""The effective share of the weights against an engine's mismatch: of all ranks together, not a mean of theirs."""

from __future__ import annotations

import pytest
import torch
from small_rollouts import Ranks, completions, rollout

from lit_rl.algorithms import GRPO
from lit_rl.algorithms.evaluation.summary_statistics import Averages
from lit_rl.algorithms.terms.token_weights import EngineCorrection
from lit_rl.ops.reductions import Metrics

WIDTHS = 2, 3
WEIGHTS = 0.2, 3.0


def averages_of(*parts: int) -> Averages:
    """What is recorded of parts of a rollout, in each of which all tokens have the same weight."""
    averages = Averages()
    for part in parts:
        averages.add(metrics_of(part))
    return averages


def metrics_of(part: int) -> Metrics:
    drawn = completions([WIDTHS[part]] * 2, 1)
    advantages = torch.zeros(2)
    taken = rollout(advantages, advantages, drawn, old_logprobs=drawn.sampler_logprobs)
    engine = EngineCorrection(lambda old, sampler, mask: WEIGHTS[part] * mask, None, None, exact=False)
    return engine.at_rollout(taken, version=0)[1]


def test_two_ranks_with_constant_weights(monkeypatch):
    ranks = Ranks(2)
    monkeypatch.setattr(torch.distributed, "all_reduce", ranks.all_reduce)
    for logged in ranks.run(lambda m: averages_of(m.ranks.rank).reduce(m.ranks)):
        # 4 tokens of weight 0.2 and 6 of weight 3
        assert logged["sampling/ess"] == pytest.approx((0.8 + 18) ** 2 / (10 * (0.16 + 54)))
        assert logged["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.88)


def test_two_parts_of_one_rank_are_as_two_ranks():
    assert averages_of(0, 1).reduce()["sampling/ess"] == pytest.approx((0.8 + 18) ** 2 / (10 * (0.16 + 54)))


def test_without_a_trainer_it_is_that_of_the_rows_at_hand():
    assert averages_of(0).reduce(GRPO("tiny", len).ranks)["sampling/ess"] == pytest.approx(1)
