"""`lit-rl best-of-n`: the best completion of every prompt, as a data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Command, Outcome, refused, write_jsonl

pytestmark = pytest.mark.all

SUMS = [{"prompt": f"{n}+{n + 3}=", "answer": str(2 * n + 3), "level": n} for n in range(1, 9)]


@pytest.fixture
def best(command: Command, cwd: Path) -> Command:
    base = ["best-of-n", "trainer.accelerator=cpu", "logger=none", "run_dir=run"]
    return lambda *arguments: command(*base, *arguments)


def written(cwd: Path) -> list[dict[str, Any]]:
    (path,) = (cwd / "run").glob("best_of_n_*/best_of_n.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(outcome: Outcome, name: str) -> list[float]:
    line = next(line for line in outcome.out.splitlines() if name in line)
    cells = [cell.strip() for cell in line.split("│")[2:4]]
    return [float(cell) for text in cells for cell in text.split(" to ")]


def test_every_row_of_the_file_gets_its_best(best, command, cwd, tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", SUMS)
    outcome = best(f"data.path={path}", "eval.group_size=6")
    assert outcome.code == 0, outcome.err
    assert "6 completions of 8 prompts at temperature 1" in outcome.out
    assert "training prompt" not in outcome.err
    rows = written(cwd)
    assert [(row["prompt"], row["answer"], row["level"]) for row in rows] == [
        (row["prompt"], row["answer"], row["level"]) for row in SUMS
    ]
    # The same samples, drawn by `predict`: the first completion of the highest reward.
    same = ["data=jsonl", f"data.path={path}", f"data.val_path={path}", "eval.group_size=6", "eval.temperature=1"]
    drawn = command("train", "task=predict", "trainer.accelerator=cpu", "logger=none", "run_dir=drawn", *same)
    assert drawn.code == 0, drawn.err
    (predicted,) = (cwd / "drawn").glob("predict_*/predictions.jsonl")
    table = [json.loads(line) for line in predicted.read_text().splitlines()]
    groups = [table[i : i + 6] for i in range(0, len(table), 6)]
    firsts = [max(group, key=lambda row: row["reward"]) for group in groups]
    assert [(r["completion"], r["reward"]) for r in rows] == [(r["completion"], r["reward"]) for r in firsts]
    mean = sum(row["reward"] for row in table) / len(table)
    assert numbers(outcome, "of all completions")[0] == pytest.approx(mean, abs=1e-4)
    of_best = numbers(outcome, "of the best")
    assert of_best[0] == pytest.approx(sum(row["reward"] for row in rows) / 8, abs=1e-4)
    assert of_best[1] <= of_best[0] <= of_best[2]
    assert of_best[0] > mean


def test_what_it_writes_is_learned_from(best, command, cwd, tmp_path):
    prompts = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in SUMS]
    path = write_jsonl(tmp_path / "mine.jsonl", prompts)
    outcome = best(f"data.path={path}", "eval.group_size=2", "reward=length")  # the shortest is the best
    rows = written(cwd)
    assert all(row["completion"].strip() for row in rows)
    assert [row["prompt"] for row in rows] == [
        r["prompt"] for r in prompts if r["prompt"] in [x["prompt"] for x in rows]
    ]
    assert f"{8 - len(rows)} of the prompts are not in the file: their best completion is empty" in outcome.out
    (made,) = (cwd / "run").glob("best_of_n_*/best_of_n.jsonl")
    learn = ["algo=sft", "data=texts", f"data.path={made}", "data.batch_size=4", "data.val_fraction=0"]
    quick = ["trainer.accelerator=cpu", "trainer.max_steps=1", "logger=none", "run_dir=learned"]
    outcome = command(*learn, *quick)
    assert outcome.code == 0, outcome.err


def test_validation_sets_of_their_own_are_asked(best, cwd, tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", SUMS)
    held = write_jsonl(tmp_path / "held.jsonl", [{"prompt": "50+1=", "answer": "51"}])
    outcome = best(f"data.path={path}", f"data.val_path={held}", "eval.group_size=2", "eval.temperature=0.5")
    assert outcome.code == 0, outcome.err
    assert "at temperature 0.5" in outcome.out
    assert [row["prompt"] for row in written(cwd)] == ["50+1="]


def test_the_tasks_prompts_and_the_limit(best, cwd):
    outcome = best("data=addition", "eval.group_size=2", "eval.limit=3")
    assert outcome.code == 0, outcome.err
    assert len(written(cwd)) == 3


REWARD = """\
def some(prompts, completions):
    return [None if prompt.startswith("1+") else float(len(text)) for prompt, text in zip(prompts, completions)]


def none(completions):
    return [None for _ in completions]
"""


def test_prompts_that_no_reward_applies_to_are_left_out(best, cwd, tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    path = write_jsonl(tmp_path / "mine.jsonl", SUMS)
    outcome = best(f"data.path={path}", "eval.group_size=2", "reward=function", f"reward.fn={tmp_path}/mine.py:some")
    assert outcome.code == 0, outcome.err
    assert "1 of the prompts are not in the file: no reward applies" in outcome.out
    assert [row["prompt"] for row in written(cwd)] == [row["prompt"] for row in SUMS[1:]]
    outcome = best(f"data.path={path}", "eval.group_size=2", "reward=function", f"reward.fn={tmp_path}/mine.py:none")
    refused(outcome, 4, "None for every completion")
