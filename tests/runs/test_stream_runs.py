"""Runs whose rows are read as they are needed: with a length of their own, refused before weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs_helpers import EVERY_STEP, assert_same, newest, rows

from lit_rl.models.language_model import LanguageModel

pytestmark = pytest.mark.all

QUICK = [
    "trainer.max_steps=7",
    "trainer.accumulate_grad_batches=2",
    "trainer.log_every_n_steps=1",
    "data.batch_size=8",
    "data.stream_buffer=20",
    "data.max_length=32",
    "data.val_fraction=0",
    "logger=none",
    *EVERY_STEP,
]
"""Windows of two steps (four where a pair is two verdicts), so steps 2, 4, 6 and 8 are a window's last."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """50 rows of every format: the run's 7 steps begin them again."""
    sums = [(i, j) for i in range(10) for j in range(5)]
    lines = {
        "texts": [{"prompt": f"{i}+{j}=", "completion": str(i + j)} for i, j in sums],
        "pairs": [{"prompt": f"{i}+{j}=", "chosen": str(i + j), "rejected": str(i)} for i, j in sums if j],
    }
    lines["val"] = [{"prompt": "20+3=", "completion": "23", "chosen": "23", "rejected": "3", "answer": "23"}]
    for name, found in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return tmp_path


def cosine(folder: Path) -> list[str]:
    val = [f"data.val_path={folder / 'val.jsonl'}", "eval.limit=1", "reward=exact_match"]
    return ["algo=sft", "data=texts", *val, f"data.path={folder / 'texts.jsonl'}", "scheduler=cosine"]


def test_a_longer_run_begins_as_a_shorter_one_and_goes_on(train, data, tmp_path):
    """`max_steps` raised after the run: the steps are those of a run that was meant to be so long."""
    overrides = [*QUICK, *cosine(data), "scheduler=constant"]
    assert train(*overrides, f"run_dir={tmp_path / 'whole'}") == 0
    assert train(*overrides, "trainer.max_steps=5", f"run_dir={tmp_path / 'part'}") == 0
    last = tmp_path / "part" / "checkpoints" / "step_00000005.ckpt"
    assert train(*overrides, f"run_dir={tmp_path / 'longer'}", f"ckpt_path={last}") == 0
    first, second = newest(tmp_path / "whole"), newest(tmp_path / "longer")
    assert first["global_step"] == second["global_step"] == 7
    assert_same(first["state_dict"], second["state_dict"])


def test_the_run_is_one_epoch_whose_shares_mean_what_they_say(train, data, tmp_path):
    """Half of it is half of `max_steps`; a cosine ends with the last step; batches to overfit are the same again."""
    validated = ["trainer.val_check_interval=0.5", "trainer.max_steps=8", "scheduler.warmup_steps=0"]
    assert train(*QUICK, *cosine(data), *validated, f"run_dir={tmp_path / 'run'}") == 0
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found if "val/loss" in row and row["step"]][:2] == [4, 8]
    rates = [row["train/lr"] for row in found if "train/lr" in row]
    assert len(rates) == 8 and rates == sorted(rates, reverse=True) and rates[-1] < 0.1 * rates[0]
    again = ["trainer.overfit_batches=4", "trainer.max_steps=6", "optimizer.lr=1e-12", "trainer.max_epochs=9"]
    assert train(*QUICK, *cosine(data), *again, f"run_dir={tmp_path / 'same'}") == 0
    losses = [row["train/loss"] for row in rows(tmp_path / "same") if "train/loss" in row]
    assert losses == pytest.approx(losses[:2] * 3, rel=1e-5) and losses[0] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    "overrides, words",
    [
        (
            ["algo=sft", "data=texts", "data.max_length=1024"],
            ["A row of a stream may have 1024", "data.max_length to 512"],
        ),
        (["algo=sft", "data=texts", "trainer.max_steps=-1"], ["trainer.max_steps", "trainer.max_epochs", "no end"]),
        (["algo=sft", "data=texts", "trainer.reload_dataloaders_every_n_epochs=1"], ["reload_dataloaders"]),
        (["algo=dpo", "algo.precompute_reference=true"], ["algo.precompute_reference=true", "data.stream_buffer"]),
        (["algo=bco", "algo/prompt_weights=density_ratio"], ["algo/prompt_weights=none", "data.stream_buffer"]),
        (["algo=gkd", "data=texts", "algo.on_policy_fraction=0.5"], ["algo.on_policy_fraction=0"]),
    ],
    ids=["context", "max_steps", "reload", "precompute", "density_ratio", "gkd"],
)
def test_what_a_stream_cannot_do_ends_with_exit_code_2_before_weights(
    overrides, words, train, data, tmp_path, monkeypatch, capsys
):
    loaded: list[Any] = []
    monkeypatch.setattr(LanguageModel, "load", lambda self, *args, **kwargs: loaded.append(self))
    kind = "texts" if "data=texts" in overrides else "pairs"
    teacher = ["algo.teacher.name=tiny"] if "algo=gkd" in overrides else []
    chosen = overrides if kind == "texts" else ["data=preferences", *overrides]
    path = f"data.path={data / kind}.jsonl"
    assert train(*QUICK, *chosen, *teacher, path, f"run_dir={tmp_path / 'run'}") == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words) and "Traceback" not in said, said
    assert loaded == [] and not (tmp_path / "run").exists()
