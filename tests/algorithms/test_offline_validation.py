"""Who writes to validation prompts: every method that trains a policy from a data set, and no model that scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_rollouts import trainer

import lit_rl.algorithms
from lit_rl.algorithms import BCO, CPO, DPO, GKD, KTO, ORPO, SFT, TPO, Evaluation, ProcessRewardModeling, RewardModeling
from lit_rl.algorithms.loop.generating import GeneratingModule
from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.loop.offline import OfflineModule
from lit_rl.algorithms.reward_modeling import ScalarModule
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule, StepwiseDataModule, SupervisedDataModule
from lit_rl.data.tasks import AdditionPairs, AdditionSteps, AdditionText, AdditionTriples
from lit_rl.rewards import exact_match

METHODS: dict[type, dict[str, Any]] = {
    **{method: {"sampling": Sampling(max_new_tokens=3)} for method in (SFT, DPO, CPO, TPO, ORPO, KTO, BCO)},
    GKD: {"sampling": Sampling(max_new_tokens=3), "teacher": "tiny"},
    RewardModeling: {},
    ProcessRewardModeling: {},
}
"""Every method that learns from a data set, with settings for a quick validation."""
WRITE = [method for method in METHODS if method not in (RewardModeling, ProcessRewardModeling)]
SCORE = [RewardModeling, ProcessRewardModeling]
DATA = {
    "texts": lambda: SupervisedDataModule(task=AdditionText(max_operand=9, val_rows=6)),
    "pairs": lambda: PreferenceDataModule(task=AdditionPairs(max_operand=9, val_rows=6)),
    "triples": lambda: PreferenceDataModule(task=AdditionTriples(max_operand=9, val_rows=6)),
    "verdicts": lambda: PreferenceDataModule(task=AdditionPairs(max_operand=9, val_rows=6)),
    "stepwise": lambda: StepwiseDataModule(task=AdditionSteps(max_operand=9, val_rows=6)),
}


def validated(module: Any, folder: Path) -> dict[str, float]:
    runner = trainer(folder, max_steps=1, limit_val_batches=1.0)
    runner.validate(module, datamodule=DATA[module.learns_from](), verbose=False)
    return {name: float(value) for name, value in runner.callback_metrics.items()}


def test_every_method_that_learns_from_a_data_set_is_here() -> None:
    offered = {value for value in vars(lit_rl.algorithms).values() if isinstance(value, type)}
    assert {method for method in offered if issubclass(method, OfflineModule)} == METHODS.keys()
    assert [method for method in METHODS if issubclass(method, GeneratingModule)] == WRITE
    assert [method for method in METHODS if issubclass(method, ScalarModule)] == SCORE


@pytest.mark.parametrize("method", SCORE)
def test_a_model_that_scores_has_nothing_to_generate_with(method: type) -> None:
    adds = set(dir(GeneratingModule("tiny", exact_match))) - set(dir(PolicyModule("tiny")))
    assert {"generator", "sampling", "evaluation", "judge", "reward_functions", "source", "generate", "reward"} <= adds
    assert adds & set(dir(method("tiny"))) == set()


@pytest.mark.parametrize("method", SCORE)
def test_a_model_that_scores_is_validated_by_its_loss(method: type, tmp_path: Path) -> None:
    found = validated(method("tiny"), tmp_path)
    assert {"val/loss", "val/accuracy"} <= found.keys()
    assert not any("completions" in name or "prompts" in name or name == "val/reward" for name in found)


@pytest.mark.parametrize("method", [pytest.param(m, marks=[] if m in (SFT, DPO) else pytest.mark.all) for m in WRITE])
def test_a_policy_is_validated_by_its_loss_and_by_what_it_writes(method: type, tmp_path: Path) -> None:
    found = validated(method("tiny", exact_match, **METHODS[method]), tmp_path)
    assert {"val/loss", "val/reward", "val/rewards/exact_match/mean", "val/completions/mean_length"} <= found.keys()
    assert found["val/prompts"] == 6
    assert 1 <= found["val/completions/mean_length"] <= 3


@pytest.mark.parametrize(
    ("method", "settings"),
    [(SFT, {}), (SFT, {"neftune_alpha": 5.0}), (DPO, {}), (KTO, {}), (RewardModeling, {}), (ProcessRewardModeling, {})],
    ids=["sft", "noise", "dpo", "kto", "reward", "process"],
)
def test_no_more_rows_are_measured_at_once_than_fit(method: type, settings: dict[str, Any], tmp_path: Path) -> None:
    """All rows of a validation set are one batch here: its loss does not depend on what fits."""
    seen: list[int] = []

    def measured(gigabytes: float) -> dict[str, float]:
        few = {"evaluation": Evaluation(limit=1)} if method in WRITE else {}
        module = method("tiny", micro_batch_size="auto", **METHODS[method], **few, **settings)
        module.micro_batches.memory_gb = gigabytes
        module.configure_model()
        seen.clear()
        module.policy.get_input_embeddings().register_forward_hook(lambda _, args, out: seen.append(len(args[0])))
        return validated(module, tmp_path)

    whole = measured(64.0)
    most = max(seen)
    assert measured(0.0031) == pytest.approx(whole, rel=1e-4, abs=1e-5)
    assert max(seen) < most
