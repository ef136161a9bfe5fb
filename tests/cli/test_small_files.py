"""A step takes what is left of a small file, where nobody said how many rows it takes; what was left out is said."""

from __future__ import annotations

import json

import pytest
from cli_helpers import refused, write_jsonl

PROMPTS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(3)]
PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "no"} for n in range(2)]
QUICK = ("trainer.accelerator=cpu", "logger=none", "run_dir=run", "trainer.max_steps=1")


@pytest.mark.parametrize(("rows", "algo"), [(PROMPTS, "grpo"), (PAIRS, "dpo")], ids=["prompts", "pairs"])
def test_two_rows_are_trained_on(command, cwd, caplog, rows, algo):
    (cwd / "mine.json").write_text(json.dumps([*rows, {**rows[0], "prompt": ""}]))  # an array, with an empty prompt
    key, fits = ("data.prompts_per_rollout", 2) if algo == "grpo" else ("data.batch_size", 1)
    more = () if algo == "grpo" else ("data.max_dropped=1",)
    outcome = command("train", "data.path=mine.json", f"algo={algo}", *QUICK, *more)
    assert outcome.code == 0, outcome.err
    said = outcome.out + outcome.err + caplog.text  # Lightning may log to the standard error of an earlier test
    assert f"{key}={fits}, in place of the default 32: {fits} rows are left for training" in said
    assert f"train: {len(rows)} of {len(rows) + 1} rows are left: 1 empty" in said


def test_a_size_that_was_typed_stays(command, cwd):
    path = write_jsonl(cwd / "mine.jsonl", PROMPTS)
    outcome = command("train", f"data.path={path}", "data.prompts_per_rollout=32", *QUICK)
    refused(outcome, 3, "data.prompts_per_rollout=32, and 2 rows are left for training: rows 3, kept 2,", "2 or less")
