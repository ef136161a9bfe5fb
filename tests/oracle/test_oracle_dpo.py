"""DPO against TRL 1.16: every loss with every option that fits it, of all weights and of adapters, and every metric."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle_cases import assert_same_step
from oracle_dpo import LOSSES, SMOOTHED, make_trainer, our_batch, our_module, ours, theirs
from tiers import in_turn, quick

from lit_rl.algorithms import DPO
from lit_rl.ops.preference_losses import sft, sigmoid
from lit_rl.ops.reductions import masked_sum

SCORED = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
"""Losses that TRL takes with any divergence."""

DIVERGENCES: tuple[dict[str, Any], ...] = (
    {"f_divergence_type": "forward_kl"},
    {"f_divergence_type": "js_divergence"},
    {"f_divergence_type": "alpha_divergence"},
    {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.7},
    {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
)


@pytest.fixture(scope="module", params=quick(["full", "lora"], {"full"}))
def trl(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_trainer(tmp_path_factory.mktemp(request.param), lora=request.param == "lora")


def settings_of(name: str, **options: Any) -> dict[str, Any]:
    """The smoothing of exo_pair may not be 0."""
    return {"loss_types": [name], "label_smoothing": 0.1 if name == "exo_pair" else 0.0, **options}


def assert_same(trl: Any, settings: dict[str, Any]) -> None:
    module = our_module(settings, lora=trl.ref_model is None)
    mine, other = ours(trl, module), theirs(trl, settings)
    assert_same_step(mine, other)
    assert mine.metrics.keys() == other.metrics.keys()
    # Rewards are small differences of log-probs that are large, which float32 holds to 1e-7 of their own size.
    size = module.beta * max(abs(other.metrics[f"logps/{side}"][0]) for side in ("chosen", "rejected"))
    for name, (value,) in other.metrics.items():
        lost = 3e-7 * size if name.startswith("rewards/") else 0.0
        assert mine.metrics[name][0] == pytest.approx(value, rel=1e-5, abs=1e-6 + lost), name


@in_turn(name=LOSSES, beta=[0.1, 2.0])
def test_every_loss(trl: Any, name: str, beta: float) -> None:
    assert_same(trl, settings_of(name, beta=beta))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", SMOOTHED)
def test_label_smoothing(trl: Any, name: str, smoothing: float) -> None:
    if smoothing or name != "exo_pair":
        assert_same(trl, settings_of(name, label_smoothing=smoothing))


@pytest.mark.parametrize(
    ("name", "divergence"),
    [
        *(("sigmoid", divergence) for divergence in DIVERGENCES),
        *((name, DIVERGENCES[at % 5]) for at, name in enumerate(SCORED) if name not in ("sigmoid", "sft")),
    ],
)
def test_divergences(trl: Any, name: str, divergence: dict[str, Any]) -> None:
    assert_same(trl, settings_of(name, **divergence))


@in_turn(name=LOSSES, share=[0.0, 0.5])
def test_tail_weight(trl: Any, name: str, share: float) -> None:
    assert_same(trl, settings_of(name, ld_alpha=share))


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("aot", "aot_unpaired", "sft", "hinge")])
def test_likelihood_weights(trl: Any, name: str) -> None:
    assert_same(trl, settings_of(name, use_weighting=True))


@pytest.mark.parametrize(
    "options",
    [
        {"loss_types": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        {"loss_types": ["sigmoid", "sft"]},
        {"loss_types": ["aot", "apo_zero", "ipo"], "loss_weights": [1.0, 0.0, 0.3]},
        {"loss_types": ["sigmoid", "sft"], "ld_alpha": 0.5, "f_divergence_type": "js_divergence"},
        {"loss_types": ["sigmoid", "ipo"], "ld_alpha": 0.3, "use_weighting": True},
        {"loss_types": ["robust", "sft"], "label_smoothing": 0.2, "router_aux_loss_coef": 0.3},
        {"loss_types": ["sigmoid"], "router_aux_loss_coef": 0.5},
    ],
    ids=["mpo", "rpo", "three", "tail-js", "tail-weights", "robust-router", "router"],
)
def test_several_at_once(trl: Any, options: dict[str, Any]) -> None:
    assert_same(trl, options)


# ---------------------------------------------------------------- where TRL is wrong, or refuses


def columns_of(trl: Any, module: DPO) -> tuple[Any, Any, Any]:
    """The batch, our pairs and our scores of it."""
    module.policy, module.reference_policy = trl.model, trl.ref_model
    batch = our_batch(trl)
    scores = module.text_scores(batch.tokens, stats=True)
    return batch, module.pairs(module.columns(batch, scores), batch), scores


def test_sigmoid_reads_the_label_smoothing_which_trl_ignores(trl: Any) -> None:
    assert theirs(trl, {"label_smoothing": 0.2}).loss == theirs(trl, {}).loss
    smoothed = DPO("tiny", preference=lambda pairs, beta: sigmoid(pairs, beta, label_smoothing=0.2))
    smoothed.reference = our_module({}, lora=trl.ref_model is None).reference
    _, pairs, _ = columns_of(trl, smoothed)
    z = 0.1 * (pairs.chosen_ratio - pairs.rejected_ratio)
    expected = ((1 + (-z).exp()).log() * 0.8 + (1 + z.exp()).log() * 0.2).mean()
    assert ours(trl, smoothed).loss == pytest.approx(expected.item(), rel=1e-5)


def test_likelihood_weights_of_sft_weigh_each_pair_which_trl_cannot(trl: Any) -> None:
    """TRL writes the weights into one number for all pairs, which torch refuses."""
    settings = {"loss_types": ["sft"], "use_weighting": True}
    with pytest.raises(RuntimeError, match="single memory location"):
        theirs(trl, settings)
    module = our_module(settings, lora=trl.ref_model is None)
    batch, _, scores = columns_of(trl, module)
    mask, count = batch.tokens.learned, len(batch)
    nll = -masked_sum(scores.logprobs, mask, 1)[:count]
    expected = (weights_of(batch, scores) * nll).sum() / mask[:count].sum()
    assert ours(trl, module).loss == pytest.approx(expected.item(), rel=1e-5)


def test_likelihood_weights_of_hinge_which_trl_cannot(trl: Any) -> None:
    """TRL overwrites what the gradient of its `relu` still needs."""
    settings = {"loss_types": ["hinge"], "use_weighting": True}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        theirs(trl, settings)
    module = our_module(settings, lora=trl.ref_model is None)
    batch, pairs, scores = columns_of(trl, module)
    weight = weights_of(batch, scores)
    expected = (weight * (1 - 0.1 * pairs.margin).clamp(min=0)).mean()
    assert ours(trl, module).loss == pytest.approx(expected.item(), rel=1e-5)


def weights_of(batch: Any, scores: Any) -> torch.Tensor:
    """WPO's, eq. 2 of 2406.11827."""
    mask, count = batch.tokens.learned, len(batch)
    relative = masked_sum(scores.logprobs.detach() - scores.stats.log_sum_sq, mask, 1) / mask.sum(1)
    return (relative[:count] + relative[count:]).exp()


def test_without_a_reference_log_ratios_are_log_probs(trl: Any) -> None:
    from lit_rl.models.references import ReferenceFree

    module = DPO("tiny", reference=ReferenceFree(), preference={"sigmoid": sigmoid, "sft": sft})
    _, pairs, _ = columns_of(trl, module)
    z = 0.1 * (pairs.chosen - pairs.rejected)
    expected = (1 + (-z).exp()).log().mean() - pairs.chosen.sum() / pairs.chosen_tokens.sum()
    assert not module.needs_reference
    mine = ours(trl, module)
    assert mine.loss == pytest.approx(expected.item(), rel=1e-5)
    assert mine.metrics["rewards/margins"][0] == pytest.approx(z.mean().item(), rel=1e-5)
    assert torch.isfinite(mine.gradient).all()
