"""`loss` of every offline method is a function: called again it says the same, and nothing of the module changed.

Its gradient is the same again on several threads (`loss_laws`), and whatever micro-batches and ranks share the step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from held_state import same, state_of
from loss_laws import AddsInOneOrder
from offline_cuts import MODEL, PAIRS, TRIPLES, VERDICTS, assert_same_step, loaded, step_of

import lit_rl.algorithms
from lit_rl.algorithms import BCO, CPO, DPO, GKD, KTO, ORPO, SFT, TPO, ProcessRewardModeling, RewardModeling
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.loop.offline import OfflineModule
from lit_rl.algorithms.terms.verdict_terms import DensityRatio
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.data.example_module import PreferenceDataModule, StepwiseDataModule, SupervisedDataModule
from lit_rl.data.loaders import ExampleLoader
from lit_rl.models.references import EMA
from lit_rl.ops.imitation import dft
from lit_rl.ops.preference_losses import aot, aot_unpaired, ipo, sft, sigmoid_norm, sppo_hard

TEXTS = [{"prompt": row["prompt"], "completion": row["completion"]} for row in VERDICTS]
STEPS = [
    {
        "prompt": row["prompt"],
        "completions": ["a", "b" * i, "c"][: i % 3 + 1],
        "labels": [row["label"], i > 4, True][: i % 3 + 1],
    }
    for i, row in enumerate(VERDICTS, start=1)
]
"""Of one to three steps, of other lengths."""

METHODS: dict[str, Any] = {
    "sft": lambda: SFT(MODEL, neftune_alpha=5.0),
    "sft-dft": lambda: SFT(MODEL, imitation=dft),
    "gkd": lambda: GKD(MODEL, teacher="tiny", beta=0.3),
    "dpo": lambda: DPO(MODEL),
    "dpo-of-all-terms": lambda: DPO(
        MODEL, preference={"a": aot, "b": aot_unpaired, "c": sppo_hard}, tail_weight=0.5, reference=EMA(0.9)
    ),
    "dpo-of-tokens": lambda: DPO(
        MODEL, preference={"a": sigmoid_norm, "b": ipo, "c": sft}, tail_weight=0.0, likelihood_weights=True
    ),
    "cpo": lambda: CPO(MODEL),
    "tpo": lambda: TPO(MODEL),
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
    "triples": (PreferenceDataModule, TRIPLES),
    "verdicts": (PreferenceDataModule, VERDICTS),
    "stepwise": (StepwiseDataModule, STEPS),
}


def test_every_offline_method_is_here() -> None:
    methods = {value for value in vars(lit_rl.algorithms).values() if isinstance(value, type)}
    offline = {method for method in methods if issubclass(method, OfflineModule)}
    assert {type(make()) for make in METHODS.values()} == offline


@pytest.mark.parametrize(("training", "accumulate"), [(True, 2), (False, 1)], ids=["training", "validation"])
@pytest.mark.parametrize("name", METHODS)
def test_loss_twice_changes_no_state(name: str, accumulate: int, training: bool) -> None:
    module = loaded(METHODS[name]())
    make, rows = ROWS[module.learns_from]
    data = make(rows=rows, batch_size=len(rows), shuffle=False, val_fraction=0.0)
    data.prepare(MODEL.tokenizer, module.learns_from)
    loader = ExampleLoader(data.corpus.train, data.order(False), accumulate=accumulate, group_by_length=True)
    batches = loader.batches(list(range(len(rows))), 0)
    if name == "bco-weighted":
        module.match_prompts(data.corpus.train.examples)
    module.train(training)
    coupled = module.couples_rows and accumulate > 1
    whole = WholeStep.of(module.step_columns, batches[0], Ranks()) if coupled else None
    before, saved = state_of(module), state_of(module.rank_state())
    with AddsInOneOrder():
        (first, metrics), (again, also) = module.loss(batches[0], whole), module.loss(batches[0], whole)
        if training:
            first.backward()
    same(before, state_of(module))
    same(saved, state_of(module.rank_state()))
    assert torch.equal(first, again)
    same(state_of(metrics), state_of(also), "metrics")
    if training:
        assert any(p.grad is not None and p.grad.any() for p in module.policy.parameters()), "nothing is learned"


@pytest.mark.parametrize("name", [*METHODS, "sft-packed", "gkd-packed"])
def test_micro_batches_and_ranks_share_one_gradient(name: str) -> None:
    """A row each, though rows have other numbers of tokens; and two ranks of two micro-batches."""
    packed = {"packing": "best_fit", "max_length": 24} if name.endswith("-packed") else {}
    module = loaded(METHODS[name.removesuffix("-packed")]())
    make, rows = ROWS[module.learns_from]
    data = make(rows=rows * (4 if packed else 1), batch_size=8, shuffle=False, val_fraction=0.0, **packed)
    data.prepare(MODEL.tokenizer, module.learns_from)
    if name == "bco-weighted":
        module.match_prompts(data.corpus.train.examples)
    whole = step_of(module, data)
    for accumulate, ranks in ((2, 1), (8, 1), (2, 2)):
        assert_same_step(step_of(module, data, accumulate, ranks), whole)
