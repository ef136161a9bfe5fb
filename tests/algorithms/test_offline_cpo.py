"""Laws of CPO and its kin: what its likelihood adds, and its metrics. TRL has the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offline_cuts import MODEL, PAIRS, data_of, loaded, micro_batches, step_of

from lit_rl.algorithms import CPO
from lit_rl.ops.preference_losses import sigmoid, simpo


@pytest.fixture(scope="module")
def policy() -> Any:
    return loaded(CPO(MODEL)).policy


def cpo(policy: Any, **settings: Any) -> CPO:
    module = CPO(MODEL, **settings)
    module.policy = policy
    return module


def test_the_likelihood_adds_the_cross_entropy_of_the_chosen_tokens(policy: Any) -> None:
    data = data_of(PAIRS, "pairs")
    without, half = (step_of(cpo(policy, nll_coef=coefficient), data) for coefficient in (0.0, 0.5))
    (batch,) = micro_batches(data)[0]
    chosen = batch.tokens.input_ids[: len(batch)]
    logits = policy(input_ids=chosen, attention_mask=batch.tokens.attention_mask[: len(batch)].long()).logits[:, :-1]
    labels = chosen[:, 1:].masked_fill(~batch.tokens.learned[: len(batch)], -100)
    expected = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).detach())
    assert half.loss - without.loss == pytest.approx(0.5 * expected, rel=1e-4)
    assert half.metrics["nll_loss"] == pytest.approx(expected, rel=1e-5)


def test_metrics_are_per_token_where_every_loss_is(policy: Any) -> None:
    data = data_of(PAIRS, "pairs")
    found = {
        name: step_of(cpo(policy, preference=preference), data).metrics["logps/chosen"]
        for name, preference in (("sum", sigmoid), ("mean", simpo), ("both", {"simpo": simpo, "sigmoid": sigmoid}))
    }
    assert found["both"] == found["sum"] < found["mean"] < 0


def test_no_reference_is_loaded() -> None:
    module = CPO(MODEL)
    module.configure_model()
    assert not module.needs_reference and module.reference_policy is None
