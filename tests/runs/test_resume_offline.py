"""A resumed run of a method that learns from a data set equals the uninterrupted one bit for bit."""

from __future__ import annotations

import json

import pytest
from runs_helpers import assert_same, assert_same_run, interrupted, newest, rows

pytestmark = pytest.mark.all

QUICK = [
    "data.task.max_operand=5",
    "data.task.val_rows=4",
    "data.batch_size=8",
    "trainer.max_steps=9",
    "trainer.accumulate_grad_batches=2",
    "logger=none",
    "eval.limit=2",
    "callbacks.checkpoint.every_n_train_steps=1",
    "callbacks.checkpoint.save_top_k=-1",
]
"""Steps of two micro-batches; 32 training rows, so step 4 is an epoch's last (8 where a pair is two verdicts)."""

SHAPES = {
    "dpo": ["algo=dpo", "trainer.log_every_n_steps=2"],
    "dpo-coupled-moving": [
        "algo=dpo",
        "algo/preference=[aot]",
        "reference=ema",
        "+model.init_kwargs.attention_dropout=0.1",
    ],
    "sft-packed": ["algo=sft", "data.packing=best_fit", "data.max_length=16", "data.batch_size=4"],
    "kto": ["algo=kto", "scheduler=cosine"],
    "bco": ["algo=bco"],
    "lora": ["algo=dpo", "model.lora.r=4"],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_resume_from_any_step_equals_the_uninterrupted_run(shape, train, tmp_path):
    whole, overrides = tmp_path / "whole", [*QUICK, *SHAPES[shape]]
    assert train(*overrides, f"run_dir={whole}") == 0
    for step in (3, 4):
        again = tmp_path / f"from_{step}"
        interrupted(whole, again, step)
        assert train(*overrides, f"run_dir={again}", "ckpt_path=last") == 0
        assert_same_run(whole, again)
        assert_same(newest(whole)["lit_rl"][0]["module"], newest(again)["lit_rl"][0]["module"])
        assert_same(newest(whole).get("reference"), newest(again).get("reference"))


def test_metrics_are_averages_over_the_steps_of_a_line(train, tmp_path):
    """One line every three steps: the mean of what three lines say; a run that is not logged logs nothing."""
    common = [*QUICK, "algo=dpo", "trainer.max_steps=6", "trainer.limit_val_batches=0"]
    assert train(*common, f"run_dir={tmp_path / 'each'}", "trainer.log_every_n_steps=1") == 0
    assert train(*common, f"run_dir={tmp_path / 'third'}", "trainer.log_every_n_steps=3") == 0
    each, third = ([row for row in rows(tmp_path / name) if "train/loss" in row] for name in ("each", "third"))
    assert [row["step"] for row in each] == [1, 2, 3, 4, 5, 6] and [row["step"] for row in third] == [3, 6]
    for name in ("train/loss", "train/rewards/margins", "train/logps/chosen", "train/grad_norm"):
        assert third[0][name] == pytest.approx(sum(row[name] for row in each[:3]) / 3, rel=1e-5), name
    assert third[1]["train/num_tokens"] == each[5]["train/num_tokens"]


def test_validation_measures_the_loss_and_writes_to_the_prompts(train, tmp_path):
    assert train(*QUICK, "algo=dpo", f"run_dir={tmp_path / 'run'}") == 0
    table = rows(tmp_path / "run")
    last = next(row for row in reversed(table) if "val/loss" in row)
    assert 0 < last["val/loss"] < 2 and 0 <= last["val/rewards/accuracies"] <= 1
    assert any("val/reward" in row for row in table) and any("val_sampled/reward" in row for row in table)
    assert not any("val_sampled/loss" in row for row in table), "a loss has no decoding"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["losses"]["before"]["val/loss"] == pytest.approx(0.6931, abs=1e-4)  # the policy is its reference
    assert summary["losses"]["after"]["val/loss"] == last["val/loss"]
    assert list((tmp_path / "run" / "samples").glob("val_*.parquet"))
