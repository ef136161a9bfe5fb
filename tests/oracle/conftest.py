"""One trainer of TRL for each of its algorithms, for all tests of this folder."""

from __future__ import annotations

import pytest
from oracle_trl import Oracle


@pytest.fixture(scope="session")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    return Oracle.of(GRPOTrainer, GRPOConfig, tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="session")
def rloo(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    from trl.trainer.rloo_config import RLOOConfig
    from trl.trainer.rloo_trainer import RLOOTrainer

    return Oracle.of(RLOOTrainer, RLOOConfig, tmp_path_factory.mktemp("rloo"))
