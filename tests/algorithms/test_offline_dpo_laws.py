"""DPO: how a step is cut changes nothing, swapped pairs flip it, and its constants where nothing has moved yet."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from offline_cuts import CUTS, PAIRS, assert_same_step, data_of, loaded, micro_batches, step_of
from torch.nn.functional import pad

from lit_rl.algorithms import DPO
from lit_rl.core.examples import PairBatch, TokenBatch
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.models.references import ReferenceFree
from lit_rl.ops import preference_losses
from lit_rl.ops.preference_losses import sft, sigmoid

LOSSES: dict[str, Any] = {
    name: getattr(preference_losses, name)
    for name in (
        "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
        "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft",
    )
} | {"cdpo": partial(preference_losses.sigmoid, label_smoothing=0.2)}  # fmt: skip
CUT = ["sigmoid", "sigmoid_norm", "aot", "aot_unpaired", "sft", "ipo"]
"""One of each kind: of pairs alone, per token, over the step, over its tokens."""


@pytest.fixture(scope="module")
def moved() -> DPO:
    """Its settings are set by each test; loading takes longer than a step."""
    return loaded(DPO("tiny"), moved=0.05)


@pytest.fixture(scope="module")
def pairs() -> PreferenceDataModule:
    return data_of(PAIRS, "pairs")


def with_loss(module: DPO, name: str, **settings: Any) -> DPO:
    made = DPO("tiny", preference=LOSSES[name], **settings)
    made.policy, made.reference_policy, made.reference = module.policy, module.reference_policy, module.reference
    return made


@pytest.mark.parametrize("name", LOSSES)
def test_the_cut_changes_nothing(moved: DPO, pairs: PreferenceDataModule, name: str) -> None:
    module = with_loss(moved, name)
    once = step_of(module, pairs)
    for cut in CUTS[1:] if name in CUT else [(4, 1)]:
        assert_same_step(step_of(module, pairs, *cut), once)


@pytest.mark.parametrize(
    "settings",
    [
        {"likelihood_weights": True},
        {"tail_weight": 0.3},
        {"tail_weight": 0.0, "likelihood_weights": True},
    ],
    ids=str,
)
def test_accumulation_changes_nothing_with_options(
    moved: DPO, pairs: PreferenceDataModule, settings: dict[str, Any]
) -> None:
    module = with_loss(moved, "sigmoid", **settings)
    once = step_of(module, pairs)
    assert_same_step(step_of(module, pairs, 4), once)
    plain = step_of(with_loss(moved, "sigmoid"), pairs)
    assert abs(plain[0] - once[0]) > 1e-4, "the option does nothing here"


def wider(batch: PairBatch, by: int) -> PairBatch:
    tokens = batch.tokens
    ids, attended, learned = (
        pad(part, (0, by), value=value)
        for part, value in ((tokens.input_ids, 7), (tokens.attention_mask, False), (tokens.loss_mask, False))
    )
    return dataclasses.replace(batch, tokens=TokenBatch(ids, attended, learned))


def test_without_a_reference_it_is_cpo_whose_likelihood_is_beside_it(pairs: PreferenceDataModule) -> None:
    """2401.08417 is the logistic loss of log-probs beside the likelihood of what was chosen."""
    free = DPO("tiny", reference=ReferenceFree(), preference={"sigmoid": sigmoid, "sft": sft})
    free.configure_model()
    assert free.reference_policy is None
    ((batch,),) = micro_batches(pairs)
    columns = free.columns(batch, free.text_scores(batch.tokens))
    z = 0.1 * (columns["chosen"] - columns["rejected"])
    expected = -torch.nn.functional.logsigmoid(z).mean() + columns["nll"].sum() / batch.totals.tokens
    assert free.loss(batch)[0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_reference_that_no_loss_reads_is_not_loaded() -> None:
    """`simpo` and its reward are of the policy's log-probs alone. Beside a loss that compares the reference is needed;
    with `sft` too: the rewards that are logged are measured against it, as in TRL."""
    simpo = partial(preference_losses.simpo, gamma=1.0)
    assert not DPO("tiny", preference=simpo).needs_reference
    assert DPO("tiny", preference={"a": simpo, "b": preference_losses.sigmoid}).needs_reference
    assert DPO("tiny", preference=preference_losses.sft).needs_reference
