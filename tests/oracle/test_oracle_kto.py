"""KTO against TRL 1.16: both losses with every setting, of all weights and of adapters, and every metric."""

from __future__ import annotations

import math
from typing import Any

import pytest
from oracle_cases import assert_same_step
from oracle_verdicts import ROWS, make_trainer, our_module, ours, theirs

ALL = list(range(len(ROWS)))


@pytest.fixture(scope="module", params=["full", "lora"])
def trl(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_trainer(tmp_path_factory.mktemp(request.param), lora=request.param == "lora")


def assert_same(trl: Any, settings: dict[str, Any], rows: list[int] = ALL) -> dict[str, list[float]]:
    module = our_module(settings, lora=trl.ref_model is None)
    mine, other = ours(trl, module, rows), theirs(trl, settings, rows)
    assert_same_step(mine, other)
    expected = {name: value for name, (value,) in other.metrics.items()}
    if settings.get("loss_type") == "apo_zero_unpaired":
        assert expected.pop("kl") == 0  # TRL logs what it does not compute
    # Rewards are small differences of log-probs that are large, which float32 holds to 1e-7 of their own size.
    size = module.beta * max(abs(value) for name, value in expected.items() if name.startswith("logps/"))
    for name, value in expected.items():
        lost = 1e-6 * size if name.startswith("rewards/") else 1e-6
        assert mine.metrics[name][0] == pytest.approx(value, rel=1e-5, abs=lost), name
    labels = [ROWS[row]["label"] for row in rows]
    counts = {"count/chosen": sum(labels), "count/rejected": len(labels) - sum(labels)}  # TRL has dropped them
    assert {name: mine.metrics[name][0] for name in counts} == counts
    assert all(math.isnan(mine.metrics[name][0]) for name in mine.metrics.keys() - expected.keys() - counts.keys())
    return mine.metrics


@pytest.mark.parametrize("beta", [0.1, 1.0])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_both_losses(trl: Any, loss_type: str, beta: float) -> None:
    assert_same(trl, {"loss_type": loss_type, "beta": beta})


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_weights_of_the_classes(trl: Any, loss_type: str) -> None:
    assert_same(trl, {"loss_type": loss_type, "desirable_weight": 1.5, "undesirable_weight": 0.7})


@pytest.mark.parametrize("rows", [[0, 2, 3], [1, 4]], ids=["desirable", "undesirable"])
def test_one_kind_only(trl: Any, rows: list[int]) -> None:
    assert_same(trl, {}, rows)


def test_the_baseline_is_above_zero_in_some_batch_and_cut_in_another(trl: Any) -> None:
    parts = [ALL, [1, 2, 4], [0, 1], [2, 3], [3, 4]]
    found = [assert_same(trl, {}, rows)["kl"][0] for rows in parts]
    assert min(found) == 0 and max(found) > 0


def test_load_balancing(trl: Any) -> None:
    assert_same(trl, {"router_aux_loss_coef": 0.3})
