"""ORPO against TRL 1.16: of all weights and of adapters, and every metric.

TRL's likelihood is a mean over the tokens of a micro-batch, ours over those of the whole step: one batch is the step.
"""

from __future__ import annotations

from typing import Any

import pytest
from oracle_cases import assert_same_step
from oracle_pairs import make_trainer, ours, theirs

from lit_rl.algorithms import ORPO
from lit_rl.models import LanguageModel


@pytest.fixture(scope="module", params=["full", "lora"])
def trl(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    folder = tmp_path_factory.mktemp(request.param)
    return make_trainer(ORPOTrainer, ORPOConfig, folder, lora=request.param == "lora")


@pytest.mark.parametrize("router", [0.0, 0.3])
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_loss_gradient_and_metrics(trl: Any, beta: float, router: float) -> None:
    module = ORPO(LanguageModel("tiny"), beta=beta, router_aux_loss_coef=router)
    settings = {"beta": beta, "aux_loss_enabled": router > 0, "aux_loss_coef": router}
    mine, other = ours(trl, module), theirs(trl, settings)
    assert_same_step(mine, other)
    for name, (value,) in other.metrics.items():
        assert mine.metrics[name][0] == pytest.approx(value, rel=1e-5, abs=1e-6), name
