"""The recipes for models of the hub, each run on the tiny policy and on rows with the columns of the hub's sets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_helpers import Command, metrics, write_jsonl

GSM8K = [{"question": f"What is {n} and {n}?", "answer": f"It is {n}+{n}={2 * n}.\n#### {2 * n}"} for n in range(8)]
ULTRAFEEDBACK = [
    {side: [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": text * n}], f"score_{side}": 1.0}
    | {other: [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": "no"}], f"score_{other}": 0.0}
    for n, (side, other, text) in enumerate([("chosen", "rejected", "yes ")] * 8, start=1)
]
HUB = ["data.split=null", "data.val_split=null", "data.val_fraction=0.25"]
ROWS = {
    "gsm8k_qwen0.5b": (GSM8K, [*HUB, "data.name=null", "data.prompts_per_rollout=2"]),
    "gsm8k_qwen0.5b_sft": (GSM8K, [*HUB, "data.name=null", "data.batch_size=2"]),
    "dpo_ultrafeedback": (ULTRAFEEDBACK, [*HUB, "data.batch_size=2"]),
    "countdown_r1zero": (
        None,
        ["data.task.train_rows=8", "data.task.val_rows=2", "data.max_prompt_tokens=1000", "data.prompts_per_rollout=2"],
    ),
}
SMALL = [
    "sampling.max_new_tokens=6", "eval.limit=2", "trainer.max_steps=2", "trainer.val_check_interval=null",
    "trainer.accelerator=cpu", "trainer.precision=32-true", "logger=none", "callbacks.samples.print=0", "run_dir=run",
]  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.all
def test_a_recipe_runs_with_another_model_and_local_rows(
    name: str, command: Command, cwd: Path, tmp_path: Path
) -> None:
    rows, words = ROWS[name]
    if rows is not None:
        words = [*words, f"data.path={write_jsonl(tmp_path / 'rows.jsonl', rows)}"]
    outcome = command(f"experiment={name}", "model.name=tiny", *words, *SMALL)
    assert outcome.code == 0, outcome.err
    assert json.loads((cwd / "run" / "summary.json").read_text())["status"] == "finished"
    assert metrics(cwd / "run")["train/grad_norm"] >= 0


def test_the_page_of_recipes_names_every_experiment_of_a_pretrained_model(root: Path) -> None:
    told = set(re.findall(r"`(\w[\w.]*)`", (root / "docs" / "recipes.md").read_text()))
    models = re.compile(r"smollm2|qwen|Qwen")
    shipped = {path.stem for path in (root / "conf/experiment").glob("*.yaml") if models.search(path.read_text())}
    assert set(ROWS) <= shipped and shipped <= told
