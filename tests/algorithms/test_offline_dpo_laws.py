"""DPO: how a step is cut changes nothing, swapped pairs flip it, and its constants where nothing has moved yet."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from offline_cuts import CUTS, PAIRS, SWAPPED, assert_same_step, data_of, loaded, micro_batches, step_by_parts, step_of
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


def test_several_losses_are_their_weighted_sum(moved: DPO, pairs: PreferenceDataModule) -> None:
    names = {"sigmoid": 0.8, "aot": 0.2, "sft": 1.5}
    module = with_loss(moved, "sigmoid")
    both = DPO("tiny", preference={name: LOSSES[name] for name in names}, preference_weights=names)
    both.policy, both.reference_policy, both.reference = module.policy, module.reference_policy, module.reference
    loss, gradient, _ = step_of(both, pairs, 2)
    each = {name: step_of(with_loss(moved, name), pairs) for name in names}
    assert loss == pytest.approx(sum(weight * each[name][0] for name, weight in names.items()), rel=1e-6)
    summed = torch.stack([weight * each[name][1] for name, weight in names.items()]).sum(0)
    torch.testing.assert_close(gradient, summed, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "sppo_hard"])
def test_swapped_sides_flip_the_margin(moved: DPO, pairs: PreferenceDataModule, name: str) -> None:
    module = with_loss(moved, name)
    _, _, one = step_of(module, pairs)
    _, _, other = step_of(module, data_of(SWAPPED, "pairs"))
    assert other["rewards/margins"] == pytest.approx(-one["rewards/margins"], rel=1e-6)
    assert other["rewards/accuracies"] == pytest.approx(1 - one["rewards/accuracies"])
    assert other["rewards/chosen"] == pytest.approx(one["rewards/rejected"], rel=1e-6)
    assert other["logps/rejected"] == pytest.approx(one["logps/chosen"], rel=1e-6)


def test_swapped_labels_turn_the_gradient_of_a_smoothing_of_one_half_to_nothing(
    moved: DPO, pairs: PreferenceDataModule
) -> None:
    """Where half of the labels are wrong, both orders of a pair say the same."""
    half = with_loss(moved, "sigmoid")
    half.preference = {"sigmoid": partial(sigmoid, label_smoothing=0.5)}
    one, other = step_of(half, pairs), step_of(half, data_of(SWAPPED, "pairs"))
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    torch.testing.assert_close(one[1], other[1], rtol=1e-4, atol=1e-7)


BETA = 0.1
AT_REFERENCE = {
    "sigmoid": math.log(2),
    "cdpo": math.log(2),
    "sigmoid_norm": math.log(2),
    "hinge": 1.0,
    "ipo": (1 / (2 * BETA)) ** 2,
    "exo_pair": math.log(0.5) - (math.log1p(-1e-3) + math.log(1e-3)) / 2,
    "nca_pair": 2 * math.log(2),
    "robust": math.log(2),
    "bco_pair": 2 * math.log(2),
    "sppo_hard": 2 * (1 / (2 * BETA)) ** 2,
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "aot_unpaired": math.log(2),
    "aot": math.log(2),
    "discopop": (math.log(2) + 1) / 2,
}


def test_known_constants_where_the_policy_is_the_reference(pairs: PreferenceDataModule) -> None:
    start = loaded(DPO("tiny"), moved=0.0)
    for name, value in AT_REFERENCE.items():
        module = with_loss(start, name, beta=BETA)
        loss, metrics = module.loss(micro_batches(pairs)[0][0])
        assert loss.item() == pytest.approx(value, rel=1e-6), name
        margins, accuracies = metrics["rewards/margins"], metrics["rewards/accuracies"]
        assert margins[0] == 0 and accuracies[0] == 0, name  # pyright: ignore  # a tie is no right answer


def wider(batch: PairBatch, by: int) -> PairBatch:
    tokens = batch.tokens
    ids, attended, learned = (
        pad(part, (0, by), value=value)
        for part, value in ((tokens.input_ids, 7), (tokens.attention_mask, False), (tokens.loss_mask, False))
    )
    return dataclasses.replace(batch, tokens=TokenBatch(ids, attended, learned))


@pytest.mark.parametrize("name", CUT)
def test_padding_changes_nothing(moved: DPO, pairs: PreferenceDataModule, name: str) -> None:
    module, ((batch,),) = with_loss(moved, name, tail_weight=0.5), micro_batches(pairs)
    assert_same_step(step_by_parts(module, [[wider(batch, 5)]]), step_by_parts(module, [[batch]]))


def test_the_order_of_the_pairs_changes_nothing(moved: DPO, pairs: PreferenceDataModule) -> None:
    for name in ("sigmoid", "aot", "sft"):
        module = with_loss(moved, name)
        turned = list(reversed(range(len(PAIRS))))
        assert_same_step(step_by_parts(module, micro_batches(pairs, 2, rows=turned)), step_of(module, pairs))


def test_a_descent_step_widens_the_margin(moved: DPO, pairs: PreferenceDataModule) -> None:
    module = loaded(DPO("tiny"), moved=0.05)
    before = step_of(module, pairs)
    with torch.no_grad():
        place = 0
        for parameter in module.policy.parameters():
            parameter -= 1e-3 * before[1][place : place + parameter.numel()].view_as(parameter)
            place += parameter.numel()
    after = step_of(module, pairs)
    assert after[0] < before[0]
    assert after[2]["rewards/margins"] > before[2]["rewards/margins"]


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
