"""ORPO by hand: what its likelihood and its odds are of."""

from __future__ import annotations

import math

import pytest
import torch
from offline_cuts import MODEL, PAIRS, data_of, loaded, step_of

from lit_rl.algorithms import ORPO


@pytest.fixture(scope="module")
def module() -> ORPO:
    return loaded(ORPO(MODEL))


def test_by_hand(module: ORPO) -> None:
    """Every text on its own, without padding: the likelihood reads the prompt too, the odds the completions alone."""
    data = data_of(PAIRS, "pairs")
    log_probs, counts, odds = 0.0, 0, []
    for example in data.corpus.train.examples:
        means = []
        for side, text in enumerate(example.texts):
            ids = torch.tensor([text.ids])
            with torch.no_grad():
                scores = module.policy(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
            each = scores.gather(1, ids[0, 1:, None])[:, 0]
            means.append(float(each[torch.tensor(text.learned[1:])].mean()))
            if side == 0:
                log_probs, counts = log_probs + float(each.sum()), counts + len(each)
        odds.append([mean - math.log(1 - math.exp(mean)) for mean in means])
    differences = [chosen - rejected for chosen, rejected in odds]
    step = step_of(module, data)
    expected = -log_probs / counts + 0.1 * sum(math.log1p(math.exp(-gap)) for gap in differences) / len(odds)
    assert step.loss == pytest.approx(expected, rel=1e-5)
    assert step.metrics["nll_loss"] == pytest.approx(-log_probs / counts, rel=1e-5)
    assert step.metrics["log_odds_chosen"] == pytest.approx(sum(differences) / len(odds), rel=1e-4)
