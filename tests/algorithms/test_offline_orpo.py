"""Laws of ORPO: how a step is cut, what its likelihood is of, swapped pairs, padding, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from offline_cuts import CUTS, MODEL, PAIRS, SWAPPED, assert_same_step, data_of, loaded, micro_batches, step_of

from lit_rl.algorithms import ORPO
from lit_rl.core.errors import ConfigError
from lit_rl.core.examples import TokenBatch


@pytest.fixture(scope="module")
def module() -> ORPO:
    return loaded(ORPO(MODEL))


@pytest.mark.parametrize("cut", CUTS[1:], ids=str)
def test_the_cut_changes_nothing(module: ORPO, cut: tuple[int, int]) -> None:
    data = data_of(PAIRS, "pairs")
    assert_same_step(step_of(module, data, *cut), step_of(module, data))


def test_swapped_pairs_flip_the_odds(module: ORPO) -> None:
    there, back = (step_of(module, data_of(rows, "pairs")).metrics for rows in (PAIRS, SWAPPED))
    assert there["log_odds_chosen"] == pytest.approx(-back["log_odds_chosen"], rel=1e-4)
    assert there["rewards/margins"] == pytest.approx(-back["rewards/margins"], rel=1e-4)
    assert there["rewards/accuracies"] == pytest.approx(1 - back["rewards/accuracies"])


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


def test_equal_completions_leave_log_2_of_the_odds(module: ORPO) -> None:
    (batch,) = micro_batches(data_of(PAIRS, "pairs"))[0]
    chosen = [part[: len(batch)].repeat(2, 1) for part in vars(batch.tokens).values() if part is not None]
    metrics: Any = module.loss(replace(batch, tokens=TokenBatch(*chosen)))[1]
    assert float(metrics["log_odds_ratio"][0]) / len(batch) == pytest.approx(-math.log(2), abs=1e-6)


def test_padding_changes_nothing(module: ORPO) -> None:
    more = torch.nn.functional.pad
    (batch,) = micro_batches(data_of(PAIRS, "pairs"))[0]
    tokens = batch.tokens
    ids = more(tokens.input_ids, (0, 3), value=7)
    wide = TokenBatch(ids, more(tokens.attention_mask, (0, 3)), more(tokens.loss_mask, (0, 3)))
    with torch.no_grad():
        found, expected = module.loss(replace(batch, tokens=wide))[0], module.loss(batch)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_batch_stays_as_it_was(module: ORPO) -> None:
    (batch,) = micro_batches(data_of(PAIRS, "pairs"))[0]
    before = batch.tokens.loss_mask.clone()
    module.loss(batch)
    assert torch.equal(batch.tokens.loss_mask, before)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan])
def test_beta_is_above_0(beta: float) -> None:
    with pytest.raises(ConfigError, match="algo.beta"):
        ORPO(MODEL, beta=beta)
