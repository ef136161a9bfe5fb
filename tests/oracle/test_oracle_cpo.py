"""CPO, SimPO and AlphaPO against TRL 1.16: every loss and option, of all weights and of adapters, and every metric.

TRL's likelihood is a mean over the chosen tokens of a micro-batch, ours over those of the whole step: one batch is the
whole step here, so they agree; over several micro-batches TRL's would weigh a token of a short batch more.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from oracle_cases import assert_same_step
from oracle_pairs import make_trainer, ours, theirs

from lit_rl.algorithms import CPO
from lit_rl.models import LanguageModel
from lit_rl.ops import preference_losses

BASE: dict[str, Any] = {
    "loss_type": "sigmoid",
    "beta": 0.1,
    "label_smoothing": 0.0,
    "cpo_alpha": 1.0,
    "simpo_gamma": 0.5,
    "alpha": 0.0,
    "aux_loss_enabled": False,
    "aux_loss_coef": 0.0,
}


@pytest.fixture(scope="module", params=["full", "lora"])
def trl(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    folder = tmp_path_factory.mktemp(request.param)
    return make_trainer(CPOTrainer, CPOConfig, folder, lora=request.param == "lora")


def our_module(trl: dict[str, Any]) -> CPO:
    """The module that TRL's settings are."""
    smooth = {"label_smoothing": trl["label_smoothing"]} if trl["loss_type"] in ("sigmoid", "simpo") else {}
    loss = partial(getattr(preference_losses, trl["loss_type"]), **smooth)
    if trl["loss_type"] == "simpo":
        loss = partial(loss, gamma=trl["simpo_gamma"])
    if trl["alpha"]:
        loss = partial(preference_losses.alphapo, alpha=trl["alpha"], gamma=trl["simpo_gamma"], **smooth)
    return CPO(
        LanguageModel("tiny"),
        beta=trl["beta"],
        preference=loss,
        nll_coef=trl["cpo_alpha"],
        router_aux_loss_coef=trl["aux_loss_coef"],
    )


def assert_same(trl: Any, **settings: Any) -> None:
    merged = BASE | settings
    mine, other = ours(trl, our_module(merged)), theirs(trl, merged)
    assert_same_step(mine, other)
    if not merged["cpo_alpha"]:
        assert other.metrics.pop("nll_loss") == [0.0]  # TRL does not compute it then; ours is measured all the same
    for name, (value,) in other.metrics.items():
        assert mine.metrics[name][0] == pytest.approx(value, rel=1e-5, abs=1e-6), name


LOSSES = [
    (name, coefficient, (0.1, 2.0)[(i + j + 1) % 2])
    for i, name in enumerate(["sigmoid", "hinge", "ipo", "simpo"])
    for j, coefficient in enumerate([1.0, 0.3, 0.0])
]


@pytest.mark.parametrize(("name", "coefficient", "beta"), LOSSES)
def test_every_loss(trl: Any, name: str, coefficient: float, beta: float) -> None:
    assert_same(trl, loss_type=name, cpo_alpha=coefficient, beta=beta)


@pytest.mark.parametrize("name", ["sigmoid", "simpo"])
def test_label_smoothing(trl: Any, name: str) -> None:
    assert_same(trl, loss_type=name, label_smoothing=0.2)


@pytest.mark.parametrize("gamma", [0.0, 1.6])
def test_margin(trl: Any, gamma: float) -> None:
    assert_same(trl, loss_type="simpo", simpo_gamma=gamma, beta=2.5)


@pytest.mark.parametrize("alpha", [0.25, -0.3, 0.8])
@pytest.mark.parametrize("coefficient", [1.0, 0.0])
def test_alphapo(trl: Any, alpha: float, coefficient: float) -> None:
    assert_same(trl, loss_type="simpo", alpha=alpha, cpo_alpha=coefficient, beta=2.5, simpo_gamma=0.1)


def test_load_balancing(trl: Any) -> None:
    assert_same(trl, aux_loss_enabled=True, aux_loss_coef=0.3)
