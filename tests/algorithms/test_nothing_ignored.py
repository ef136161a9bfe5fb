"""What a run does not read of rows and of settings, it names once, before the first step."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from small_rollouts import trainer

from lit_rl.algorithms import DPO, GRPO, KTO, SFT, RewardModeling
from lit_rl.algorithms.checks.data_and_trainer import warn_unused_evaluation
from lit_rl.algorithms.evaluation.validation import Evaluation
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.rewards import RewardRecipes, exact_match

SHORT = Sampling(max_new_tokens=2)
BESIDE = {"answer": "1", "id": 7, "weight": 0.5, "empty": None}


def reads_all(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def by_recipe() -> RewardRecipes:
    return RewardRecipes({"exact_match": exact_match}, {"7": {"exact_match": 1.0}}, column="id")


PROMPT = {"prompt": "1", **BESIDE}
TEXT = {"prompt": "1", "completion": "2", **BESIDE}
PAIR = {"prompt": "1", "chosen": "2", "rejected": "3", "margin": 1.0, **BESIDE}
VERDICT = {"prompt": "1", "completion": "2", "label": True, **BESIDE}

CASES: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "prompts": (lambda: GRPO("tiny", exact_match, sampling=SHORT), RolloutDataModule, PROMPT, "id, weight, empty"),
    "read by a recipe": (lambda: GRPO("tiny", by_recipe(), sampling=SHORT), RolloutDataModule, PROMPT, "weight, empty"),
    "read by anything": (lambda: GRPO("tiny", reads_all, sampling=SHORT), RolloutDataModule, PROMPT, ""),
    "texts": (lambda: SFT("tiny"), SupervisedDataModule, TEXT, "answer, id, weight"),
    "texts that are scored": (
        lambda: SFT("tiny", exact_match, sampling=SHORT),
        SupervisedDataModule,
        TEXT,
        "id, weight",
    ),
    "texts of pairs": (lambda: SFT("tiny"), SupervisedDataModule, PAIR, "margin, answer, id, weight, rejected"),
    "two texts": (lambda: SFT("tiny"), SupervisedDataModule, {"prompt": "1", "completion": "2", "text": "3"}, "text"),
    "tokens": (
        lambda: SFT("tiny"),
        SupervisedDataModule,
        {"input_ids": [1, 2], "position_ids": [0, 1]},
        "position_ids",
    ),
    "pairs": (lambda: DPO("tiny"), PreferenceDataModule, PAIR, "answer, id, weight, margin"),
    "pairs with margins": (lambda: RewardModeling("tiny"), PreferenceDataModule, PAIR, "answer, id, weight"),
    "verdicts": (lambda: KTO("tiny"), PreferenceDataModule, VERDICT, "answer, id, weight"),
    "verdicts of pairs": (lambda: KTO("tiny"), PreferenceDataModule, PAIR, "margin, answer, id, weight"),
}


@pytest.mark.parametrize(("made", "module", "row", "unread"), CASES.values(), ids=CASES.keys())
def test_columns_that_nothing_reads_are_named(made, module, row, unread, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    logging.getLogger("lightning.pytorch").propagate = True
    trainer(tmp_path, max_steps=0).fit(made(), datamodule=module([row] * 4, val_fraction=0.0))
    records = {id(each): each for each in caplog.records}  # one that passes two loggers with the handler comes twice
    told = [each.getMessage() for each in records.values() if "nothing reads" in each.getMessage()]
    assert told == ([f"Columns that nothing reads: {unread}."] if unread else [])


@pytest.mark.parametrize(
    ("evaluation", "stage", "sets", "limit", "said"),
    [
        ({}, "fit", [], 1.0, ""),
        ({"group_size": 4, "temperature": 1.0}, "fit", ["", "b"], 1.0, ""),
        (
            {"group_size": 4, "temperature": 1.0},
            "fit",
            [""],
            0,
            "group_size=4, .*temperature=1.0 .*limit_val_batches=0",
        ),
        ({"limit": 4}, "fit", [], 1.0, "eval.limit=4 .*no validation prompts"),
        ({"limit": 4}, "validate", [""], 0, ""),
        ({"top_p": 0.5, "limit": 4}, "fit", [""], 1.0, "^eval.top_p=0.5 changes nothing with eval.temperature=0"),
        ({"group_size": 2}, "test", [""], 1.0, "^eval.group_size=2 changes nothing with eval.temperature=0"),
    ],
)
def test_settings_of_validation_that_change_nothing_are_named(evaluation, stage, sets, limit, said, recwarn):
    warn_unused_evaluation(Evaluation(**evaluation), SimpleNamespace(limit_val_batches=limit), sets, stage)
    lines = [str(each.message) for each in recwarn]
    assert len(lines) == bool(said)
    if said:
        with pytest.warns(UserWarning, match=said):
            warn_unused_evaluation(Evaluation(**evaluation), SimpleNamespace(limit_val_batches=limit), sets, stage)
