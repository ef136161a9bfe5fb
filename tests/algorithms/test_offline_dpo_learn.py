"""DPO learns: every preset lowers its loss of a batch, most widen its margins, and RPO teaches the policy to add."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from composed_configs import tree_of
from offline_cuts import PAIRS, data_of, micro_batches, step_by_parts, whole_of
from small_rollouts import trainer
from tiers import all_but_exhaustive, quick

from lit_rl.algorithms import DPO, AdamW, Constant
from lit_rl.cli.build import build
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.tasks import AdditionPairs
from lit_rl.models.references import Mixing
from lit_rl.ops.preference_losses import sft, sigmoid
from lit_rl.rewards import exact_match

PRESETS = (
    "dpo", "cdpo", "robust_dpo", "ipo", "exo", "nca", "bco_pair", "sppo", "aot", "aot_unpaired", "apo_zero", "apo_down",
    "discopop", "hinge", "dpo_norm", "mpo", "rpo", "wpo", "ld_dpo", "tr_dpo",
)  # fmt: skip

FIRST = {"dpo", "mpo", "tr_dpo"}
PATHS = FIRST | {"aot", "aot_unpaired", "apo_down", "discopop", "rpo", "wpo", "ld_dpo"}
"""In `make test-all`: the others differ from `dpo` by a formula, which `tests/oracle/test_oracle_dpo.py` compares."""


@pytest.mark.parametrize("name", quick(all_but_exhaustive(PRESETS, PATHS), FIRST))
def test_every_preset_learns_a_batch(name: str) -> None:
    module = build(tree_of(f"algo={name}")["algo"])
    assert type(module) is DPO
    module.configure_model()
    optimizer = torch.optim.Adam(module.policy.parameters(), lr=1e-4)
    (parts,), seen = micro_batches(data_of(PAIRS, "pairs"), 2), []
    for _ in range(6):
        (whole,) = whole_of(module, [parts])
        optimizer.zero_grad()
        for batch in parts:
            loss, _ = module.loss(batch, whole)
            loss.backward()
        optimizer.step()
        seen.append(step_by_parts(module, [parts]))
    losses, margins = [loss for loss, *_ in seen], [found["rewards/margins"] for *_, found in seen]
    assert losses[-1] < losses[0]
    if name == "apo_down":  # lets both fall, at first the chosen one too
        assert seen[-1][2]["rewards/rejected"] < seen[0][2]["rewards/rejected"] < 0
        return
    if name == "discopop":  # its slope at a margin of 0 is 5 (1 - log 2) - 3/4: where nothing has moved yet, it falls
        assert margins[-1] < margins[0] < 0
        return
    assert margins[-1] > margins[0] > 0
    assert seen[-1][2]["rewards/accuracies"] >= 0.75


class Watch(L.Callback):
    """Which rows every step learns from."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(list(batch.rows))


def test_overfit_batches_learns_the_same_pairs_again_and_again(tmp_path: Path) -> None:
    module, watch = (
        DPO("tiny", optimizer=AdamW(lr=3e-4), scheduler=Constant(), sampling=Sampling(max_new_tokens=6)),
        Watch(),
    )
    data = PreferenceDataModule(task=AdditionPairs(max_operand=12, val_rows=0), batch_size=8)
    runner = trainer(tmp_path, max_steps=12, overfit_batches=2, callbacks=[watch], log_every_n_steps=1)
    runner.fit(module, datamodule=data)
    assert watch.rows == watch.rows[:2] * 6
    assert float(runner.callback_metrics["train/rewards/accuracies"]) > 0.8


@pytest.mark.exhaustive
def test_rpo_teaches_the_shipped_policy_to_add(tmp_path: Path) -> None:
    """DPO alone tells right sums from wrong ones, and writes right ones less often while it learns to: both fall."""
    module = DPO(
        "tiny",
        exact_match,
        preference={"sigmoid": sigmoid, "sft": sft},
        optimizer=AdamW(lr=1e-3),
        scheduler=Constant(),
        sampling=Sampling(max_new_tokens=6),
    )
    data = PreferenceDataModule(task=AdditionPairs(max_operand=30, val_rows=60), batch_size=64, val_batch_size=60)
    runner = trainer(tmp_path, max_steps=70, max_epochs=-1, limit_val_batches=1.0, num_sanity_val_steps=0,
                     val_check_interval=10**9, check_val_every_n_epoch=None, gradient_clip_val=1.0)  # fmt: skip
    runner.validate(module, datamodule=data, verbose=False)
    before = dict(runner.callback_metrics)
    runner.fit(module, datamodule=data)
    runner.validate(module, datamodule=data, verbose=False)
    after = runner.callback_metrics
    assert before["val/rewards/accuracies"] == 0 and before["val/reward"] < 0.6
    assert after["val/rewards/accuracies"] > 0.9
    assert after["val/reward"] > before["val/reward"] + 0.3
    assert after["val/loss"] < before["val/loss"]


@pytest.mark.parametrize("adapted", [False, True])
def test_the_reference_of_tr_dpo_follows_adapters_too(adapted: bool, tmp_path: Path) -> None:
    from lit_rl.models import LanguageModel, Lora

    model = LanguageModel("tiny", lora=Lora(r=2) if adapted else None)
    module = DPO(
        model, reference=Mixing(alpha=0.6, every=2), optimizer=AdamW(lr=1e-3), scheduler=Constant(),
        sampling=Sampling(max_new_tokens=6),
    )  # fmt: skip
    seen: list[dict[str, torch.Tensor]] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pairs = zip(module.policy.named_parameters(), module.reference_policy.parameters())  # pyright: ignore
            trained = {n: (p.detach().clone(), r.detach().clone()) for (n, p), r in pairs if p.requires_grad}
            name = next(n for n in trained if "lora_B" in n or not adapted)
            seen.append({"policy": trained[name][0], "reference": trained[name][1]})

    data = PreferenceDataModule(task=AdditionPairs(max_operand=12, val_rows=0), batch_size=8)
    trainer(tmp_path, max_steps=4, callbacks=[Look()]).fit(module, datamodule=data)
    one, two, three, four = seen
    assert not torch.equal(one["policy"], two["policy"])
    torch.testing.assert_close(two["reference"], 0.6 * two["policy"] + 0.4 * one["reference"])
    torch.testing.assert_close(three["reference"], two["reference"], rtol=0, atol=0)
    torch.testing.assert_close(four["reference"], 0.6 * four["policy"] + 0.4 * three["reference"])
