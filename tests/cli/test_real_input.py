"""A user's own file, reward and model, as typed on the command line: one optimizer step each."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_helpers import Command, Outcome, metrics, write_jsonl

pytestmark = pytest.mark.all

TEXT = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "note": "ä😀"} for n in range(1, 7)]
CHAT = [
    {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{n}+{n}="}], "answer": str(2 * n)}
    for n in range(1, 7)
]

REWARD = """\
def score(prompts, completions, answer, **columns):
    assert len(prompts) == len(completions) == len(answer)
    for prompt, completion, right in zip(prompts, completions, answer):
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        first, second = question.rstrip("=").split("+")
        assert int(first) + int(second) == int(right)
        if not isinstance(prompt, str):
            assert isinstance(completion, list) and completion[0]["role"] == "assistant"
    return [float(i % 2) for i, _ in enumerate(completions)]


def half(completions):
    return [0.5 for _ in completions]


def notes(completions, note, log_metric):
    log_metric("smileys", sum(text.count("😀") for text in note) / len(note))
    return [None for _ in completions]
"""


@pytest.fixture
def train(step: Command, cwd: Path) -> Callable[..., Outcome]:
    """One step on a file with the reward `my_reward.py:score`, in the folder `run`."""
    (cwd / "my_reward.py").write_text(REWARD, encoding="utf-8")
    base = ["data=jsonl", "reward=function", "reward.fn=./my_reward.py:score", "run_dir=run"]
    return lambda *overrides: step(*base, *overrides)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    match path.suffix:
        case ".jsonl":
            write_jsonl(path, rows)
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case ".csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        case "":
            datasets.Dataset.from_list(rows).save_to_disk(str(path))


def samples(run_dir: Path) -> pd.DataFrame:
    """The rollouts of the training."""
    return pd.concat([pd.read_parquet(path) for path in sorted(run_dir.glob("samples/step_*.parquet"))])


@pytest.mark.parametrize("name, rows", [("a.csv", TEXT), ("saved", CHAT)])
def test_every_kind_of_file_trains(train, cwd, name, rows):
    write(cwd / name, rows)
    outcome = train(f"data.path={name}")
    assert outcome.code == 0, outcome.err
    logged = metrics(cwd / "run")
    assert logged["train/reward"] == 0.5 and logged["train/rewards/score/mean"] == 0.5
    assert logged["train/grad_norm"] > 0
    assert json.loads((cwd / "run" / "summary.json").read_text())["status"] == "finished"
    table = samples(cwd / "run")
    assert len(table) == 4 and {"prompt", "completion", "reward"} <= set(table.columns)


def test_the_system_prompt_makes_messages(train, cwd):
    write(cwd / "a.jsonl", TEXT)
    outcome = train("data.path=a.jsonl", "data.system_prompt='Be brief.'")
    assert outcome.code == 0, outcome.err
    assert "Be brief." in str(samples(cwd / "run")["prompt"].iloc[0])


class TestSeveralRewards:
    def test_with_weights(self, train, cwd):
        write(cwd / "a.jsonl", TEXT)
        several = "[./my_reward.py:score,./my_reward.py:half]"
        outcome = train("data.path=a.jsonl", f"reward.fn={several}", "reward.weights=[1,0.5]")
        assert outcome.code == 0, outcome.err
        logged = metrics(cwd / "run")
        assert logged["train/rewards/score/mean"] == 0.5 and logged["train/rewards/half/mean"] == 0.5
        assert logged["train/reward"] == pytest.approx(1 * 0.5 + 0.5 * 0.5)

    def test_one_that_does_not_apply(self, train, cwd):
        write(cwd / "a.jsonl", TEXT)
        outcome = train("data.path=a.jsonl", "reward.fn=[./my_reward.py:score,./my_reward.py:notes]")
        assert outcome.code == 0, outcome.err
        logged = metrics(cwd / "run")
        assert logged["train/reward"] == 0.5  # no score is not a score of 0
        assert [value for key, value in logged.items() if key.endswith("smileys")] == [1.0]


class TestValidation:
    def test_sets_by_name(self, train, cwd):
        for name in ("a.jsonl", "easy.jsonl", "hard.csv"):
            write(cwd / name, TEXT[:4])
        outcome = train("data.path=a.jsonl", "data.val_path={easy: easy.jsonl, hard: hard.csv}")
        assert outcome.code == 0, outcome.err
        summary = json.loads((cwd / "run" / "summary.json").read_text())
        assert summary["after"].keys() == {"easy", "hard"}
        logged = metrics(cwd / "run")
        assert logged["val/easy/reward"] == 0.5 and logged["val/hard/reward"] == 0.5
        assert "val/reward" not in logged


def test_sources_with_weights(train, cwd):
    write(cwd / "a.jsonl", TEXT[:3])
    write(cwd / "b.parquet", TEXT[3:])
    sources = "data.sources=[{path: a.jsonl, weight: 3}, {path: b.parquet, weight: 1}]"
    outcome = train(sources, "data.prompts_per_rollout=4", "data.shuffle=false")
    assert outcome.code == 0, outcome.err
    prompts = samples(cwd / "run")["prompt"].tolist()
    first = {row["prompt"] for row in TEXT[:3]}
    assert sum(prompt in first for prompt in prompts) == 6 and len(prompts) == 8  # three prompts in four, twice each


def test_predictions_of_a_file(train, cwd):
    write(cwd / "a.jsonl", TEXT)
    outcome = train("task=predict", "data.path=a.jsonl", "data.val_path=a.jsonl", "trainer.limit_predict_batches=1")
    assert outcome.code == 0, outcome.err
    (path,) = (cwd / "run").glob("predict_*/predictions.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in TEXT]
    assert [row["note"] for row in rows] == ["ä😀"] * len(TEXT)
