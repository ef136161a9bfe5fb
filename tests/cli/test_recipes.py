"""The recipes for models of the hub, each run on the tiny policy and on rows with the columns of the hub's sets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_helpers import Command, metrics, refused, write_jsonl

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


SHORT = ["data.task.max_operand=20", "data.task.val_rows=2", "eval.limit=2", "trainer.max_steps=2", "logger=none"]


@pytest.mark.all
def test_the_second_stage_begins_with_the_model_of_the_first_and_says_what_to_type_where_there_is_none(
    command: Command, cwd: Path
) -> None:
    missing = command("experiment=sft_then_grpo", *SHORT)
    refused(missing, 2, "there is no runs/sft_then_grpo_sft/hf", "experiment=sft_then_grpo_sft run_dir=runs/sft_then")
    assert not (cwd / "runs").exists()
    for name in ("sft_then_grpo_sft", "sft_then_grpo"):
        outcome = command(f"experiment={name}", *SHORT, *(() if name.endswith("sft") else ("run_dir=runs/second",)))
        assert outcome.code == 0, outcome.err
    first, second = (
        json.loads((cwd / f"runs/{name}/summary.json").read_text()) for name in ("sft_then_grpo_sft", "second")
    )
    assert first["after"][""]["greedy"] == second["before"][""]["greedy"] and "greedy" in second["after"][""]
    for words in (
        ["report"],
        ["export", "export.folder=again"],
        ["replay", "replay.losses=[run]"],
    ):  # its config is read
        said = command(f"task={words[0]}", "run_dir=runs/second", *words[1:])
        assert said.code == 0, said.err

    elsewhere = command("experiment=sft_then_grpo", "sft_dir=runs/none", "model=qwen0.5b", *SHORT)
    refused(elsewhere, 2, "sft_dir=runs/none: there is no runs/none/hf")
    refused(command("sft_dir=runs/none", *SHORT), 2, "sft_dir is not a key")
    replaced = ["experiment=sft_then_grpo", "model.name=tiny", "run_dir=runs/own", *SHORT]
    refused(command(*replaced, "sft_dir=runs/none"), 2, "sft_dir is no key: nothing would read it")
    own = command(*replaced)
    assert own.code == 0, own.err
