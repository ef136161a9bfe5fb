"""Laws of CPO, TPO and their kin: what a likelihood adds, and their metrics. TRL has the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offline_cuts import MODEL, PAIRS, TRIPLES, data_of, loaded, micro_batches, step_of

from lit_rl.algorithms import CPO, TPO
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


def tpo(policy: Any, **settings: Any) -> TPO:
    module = TPO(MODEL, **settings)
    module.policy = policy
    return module


def test_tpo_is_the_margin_of_a_pair_and_the_cross_entropy_of_the_gold_tokens(policy: Any) -> None:
    """By hand, of the logits of each text alone: the gold completion has no part in the margin, nor the chosen one in
    the likelihood."""
    data = data_of(TRIPLES, "triples")
    margins, gold, tokens = [], 0.0, 0
    with torch.no_grad():
        for example in data.corpus.train.examples:
            sums = []
            for text in example.texts:
                logps = policy(input_ids=torch.tensor([text.ids])).logits[0, :-1].log_softmax(-1)
                each = logps.gather(1, torch.tensor(text.ids)[1:, None])[:, 0]
                sums.append(float(each[torch.tensor(text.learned)[1:]].sum()))
            margins.append(sums[0] - sums[1])
            gold, tokens = gold - sums[2], tokens + sum(example.texts[2].learned)
    pairs = -torch.nn.functional.logsigmoid(0.3 * torch.tensor(margins)).mean()
    found = step_of(tpo(policy, beta=0.3, nll_coef=0.5), data)
    assert found.loss == pytest.approx(float(pairs) + 0.5 * gold / tokens, rel=1e-5)
    assert found.metrics["nll_loss"] == pytest.approx(gold / tokens, rel=1e-5)
    assert found.metrics["rewards/margins"] == pytest.approx(0.3 * sum(margins) / len(margins), rel=1e-4)


def test_tpo_with_the_chosen_completion_as_the_gold_one_is_cpo(policy: Any) -> None:
    triples = data_of([{**row, "reference": row["chosen"]} for row in PAIRS], "triples")
    ours, theirs = step_of(tpo(policy, beta=0.1), triples), step_of(cpo(policy), data_of(PAIRS, "pairs"))
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert (ours.gradient - theirs.gradient).norm() <= 2e-5 * theirs.gradient.norm()


def test_no_reference_is_loaded() -> None:
    module = CPO(MODEL)
    module.configure_model()
    assert not module.needs_reference and module.reference_policy is None
