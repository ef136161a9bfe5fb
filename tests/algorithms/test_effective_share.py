"""The effective share of the weights against an engine's mismatch: of all ranks together, not a mean of theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_rollouts import Ranks, completions, rollout

from lit_rl.algorithms.evaluation.statistics import Averages
from lit_rl.algorithms.terms.engine_correction import corrected

WIDTHS = 2, 3
WEIGHTS = 0.2, 3.0


def metrics_of(module: Any) -> dict[str, Any]:
    """What a rank records whose tokens all have the same weight."""
    drawn = completions([WIDTHS[module.global_rank]] * 2, 1)
    advantages = torch.zeros(2)
    taken = rollout(advantages, advantages, drawn, old_logprobs=drawn.sampler_logprobs)
    recorded: dict[str, Any] = {}
    module.record = recorded.update
    module.rejection, module.generator, module.step = None, None, 0
    module.correction = lambda old, sampler, mask: WEIGHTS[module.global_rank] * mask
    corrected(module, taken)
    return recorded


def test_two_ranks_with_constant_weights(monkeypatch):
    ranks = Ranks(2)
    monkeypatch.setattr(torch.distributed, "all_reduce", ranks.all_reduce)
    averages = Averages()
    for metrics in ranks.run(metrics_of):
        averages.add(metrics)  # what the reduction over ranks sums
    logged = averages.reduce()
    # 4 tokens of weight 0.2 and 6 of weight 3
    assert logged["sampling/ess"] == pytest.approx((0.8 + 18) ** 2 / (10 * (0.16 + 54)))
    assert logged["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.88)


def test_without_a_trainer_it_is_that_of_the_rows_at_hand():
    module = Ranks(1).module(0)
    module.trainer_or_none = None
    averages = Averages()
    averages.add(metrics_of(module))
    assert averages.reduce()["sampling/ess"] == pytest.approx(1)
