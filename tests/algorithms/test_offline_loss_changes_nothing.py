"""`loss` of every offline method is a function: called again it says the same, and nothing of the module changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from held_state import same, state_of
from offline_cuts import MODEL, PAIRS, VERDICTS, loaded

import lit_rl.algorithms
from lit_rl.algorithms import BCO, CPO, DPO, GKD, KTO, ORPO, SFT, ProcessRewardModeling, RewardModeling
from lit_rl.algorithms.loop.offline import OfflineModule
from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.terms.density_ratio import DensityRatio
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.data.offline.datamodule import PreferenceDataModule, StepwiseDataModule, SupervisedDataModule
from lit_rl.data.offline.loader import ExampleLoader
from lit_rl.models.reference.moving import EMA
from lit_rl.ops.preference import sppo_hard
from lit_rl.ops.preference.ranked import aot

TEXTS = [{"prompt": row["prompt"], "completion": row["completion"]} for row in VERDICTS]
STEPS = [{"prompt": row["prompt"], "completions": ["a", "b"], "labels": [True, row["label"]]} for row in VERDICTS]

METHODS: dict[str, Any] = {
    "sft": lambda: SFT(MODEL, neftune_alpha=5.0),
    "gkd": lambda: GKD(MODEL, teacher="tiny", beta=0.3),
    "dpo": lambda: DPO(MODEL),
    "dpo-of-all-terms": lambda: DPO(MODEL, preference={"a": aot, "b": sppo_hard}, tail_weight=0.5, reference=EMA(0.9)),
    "cpo": lambda: CPO(MODEL),
    "orpo": lambda: ORPO(MODEL),
    "kto": lambda: KTO(MODEL),
    "bco": lambda: BCO(MODEL),
    "bco-weighted": lambda: BCO(MODEL, prompt_weights=DensityRatio()),
    "reward_model": lambda: RewardModeling(MODEL, center_coef=0.1),
    "process_reward": lambda: ProcessRewardModeling(MODEL),
}
ROWS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "texts": (SupervisedDataModule, TEXTS),
    "pairs": (PreferenceDataModule, PAIRS),
    "verdicts": (PreferenceDataModule, VERDICTS),
    "stepwise": (StepwiseDataModule, STEPS),
}


def test_every_offline_method_is_here() -> None:
    methods = {value for value in vars(lit_rl.algorithms).values() if isinstance(value, type)}
    offline = {method for method in methods if issubclass(method, OfflineModule)}
    assert {type(make()) for make in METHODS.values()} == offline


@pytest.mark.parametrize("training", [True, False], ids=["training", "validation"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_loss_twice_changes_no_state(name: str, accumulate: int, training: bool) -> None:
    module = loaded(METHODS[name]())
    make, rows = ROWS[module.learns_from]
    data = make(rows=rows, batch_size=len(rows), shuffle=False, val_fraction=0.0)
    data.prepare(MODEL.tokenizer, module.learns_from)
    loader = ExampleLoader(data.corpus.train, data._order(False), accumulate=accumulate, group_by_length=True)
    batches = loader.batches(list(range(len(rows))), 0)
    if name == "bco-weighted":
        module.match_prompts(data.corpus.train.examples)
    module.train(training)
    coupled = module.couples_rows and accumulate > 1
    whole = WholeStep.of(module.look, batches[0], Ranks()) if coupled else None
    before, saved = state_of(module), state_of(module.rank_state())
    (first, metrics), (again, also) = module.loss(batches[0], whole), module.loss(batches[0], whole)
    same(before, state_of(module))
    same(saved, state_of(module.rank_state()))
    assert torch.equal(first, again)
    same(state_of(metrics), state_of(also), "metrics")
    if training:
        first.backward()
        assert any(p.grad is not None and p.grad.any() for p in module.policy.parameters()), "nothing is learned"
