"""The presets of KTO, BCO, CPO and ORPO learn from right and wrong sums what they then say of held-out ones."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
from composed_configs import tree_of
from small_rollouts import trainer as quiet_trainer
from tiers import all_but_exhaustive, quick

from lit_rl.cli.build import build

SETTINGS = [
    "data.task.max_operand=29",
    "data.task.val_rows=100",
    "data.batch_size=32",
    "data.val_batch_size=100",
    "scheduler=constant",
    "scheduler.warmup_steps=0",
    "eval.temperature=0",
]


STEPS = 40


def run(name: str, folder: Path, rate: float) -> tuple[dict[str, float], dict[str, float]]:
    """What is measured on held-out rows before and after."""
    tree = tree_of(f"algo={name}", f"optimizer.lr={rate}", *SETTINGS)
    module, data = build(tree["algo"]), build(tree["data"])
    trainer = quiet_trainer(
        folder,
        max_steps=STEPS,
        gradient_clip_val=1.0,
        limit_val_batches=1.0,
        num_sanity_val_steps=0,
        val_check_interval=STEPS,
        check_val_every_n_epoch=None,
    )
    trainer.validate(module, datamodule=data, verbose=False)
    before = measured(trainer)
    trainer.fit(module, datamodule=data)
    return before, measured(trainer)


def measured(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    "name", quick(all_but_exhaustive(["kto", "apo_zero_unpaired", "bco"], {"kto", "bco"}), {"kto"})
)
def test_verdicts_are_told_apart(name: str, tmp_path: Path) -> None:
    """At the reference every reward is 0. The learning rate is low: a larger one makes all completions unlikely first,
    right ones too, and neither objective minds while wrong ones fall further."""
    before, after = run(name, tmp_path, 1e-4)
    assert before["val/rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert after["val/rewards/margins"] > 0.02
    assert after["val/loss"] < before["val/loss"] - 0.002


@pytest.mark.all
@pytest.mark.parametrize("name", all_but_exhaustive(["simpo", "alphapo"], ()))
def test_right_sums_become_likelier_than_wrong_ones(name: str, tmp_path: Path) -> None:
    before, after = run(name, tmp_path, 1e-4)
    assert after["val/loss"] < 0.95 * before["val/loss"]
    assert after["val/rewards/accuracies"] > before["val/rewards/accuracies"] + 0.02


@pytest.mark.all
@pytest.mark.parametrize("name", all_but_exhaustive(["cpo", "cpo_simpo", "orpo", "tpo"], {"cpo", "orpo", "tpo"}))
def test_with_a_likelihood_more_sums_are_written_right(name: str, tmp_path: Path) -> None:
    before, after = run(name, tmp_path, 3e-4)
    assert after["val/nll_loss"] < 0.8 * before["val/nll_loss"]
    if name != "tpo":  # its beta is a tenth of the others'
        assert after["val/rewards/accuracies"] > before["val/rewards/accuracies"] + 0.02
    assert after["val/reward"] > before["val/reward"] + 0.07
