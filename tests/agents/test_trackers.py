"""W&B, MLflow, Trackio, CSV and TensorBoard, the real ones without a network: every row and column of `samples/`."""

from __future__ import annotations

import csv
import json
import math
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_rl.callbacks.output_files import list_tables

for package in ("wandb", "mlflow", "trackio"):
    pytest.importorskip(package, reason="make agents")
ROOT = Path(__file__).parents[2]

REWARDS = """
def right(completions, answer, log_extra, **_):
    log_extra("note", [f"{i}: " + "very long, " * 400 + "\\n|end|" for i in range(len(completions))])
    return [float(c.strip() == a) for c, a in zip(completions, answer)]


def short(completions, **_):
    return [None if i == 0 else 1.0 / (1 + len(c)) for i, c in enumerate(completions)]
"""
CONFIG = """
defaults: [/schemas/Rewards@_here_]
functions:
  right: { _target_: lit_rl.rewards.load_function, path: "./rewards.py:right" }
  short: { _target_: lit_rl.rewards.load_function, path: "./rewards.py:short" }
"""
NAMES = {"samples": "step_????????", "val_samples_t0": "val_????????_t0", "val_samples_t1": "val_????????_t1"}
"""What `samples/` calls the tables of a key."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps with a validation before and after, which all trackers watched."""
    here = tmp_path_factory.mktemp("trackers")
    (here / "conf" / "reward").mkdir(parents=True)
    (here / "conf" / "reward" / "mine.yaml").write_text(CONFIG)
    (here / "rewards.py").write_text(REWARDS)
    words = ["--config-dir", "conf", "reward=mine", "logger=[wandb,mlflow,trackio,csv,tensorboard]", "run_dir=run"]
    words += ["trainer.max_steps=2", "data.prompts_per_rollout=4", "algo.group_size=4", "data.task.max_operand=5"]
    words += ["data.task.val_rows=3"]
    words += ["eval.limit=3", "callbacks.samples.print=0", "callbacks.samples.every=1", "trainer.accelerator=cpu"]
    env = {**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(here / "trackio"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "train.py"), *words]
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "not written" not in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    (here / "said").write_text(done.stdout)
    return here


Rows = list[dict[str, Any]]


def of_wandb(here: Path) -> Iterator[tuple[str, Rows]]:
    for path in here.glob("run/wandb/offline-run-*/files/media/table/*.table.json"):
        found = json.loads(path.read_text())
        yield path.name.rsplit("_", 2)[0], [dict(zip(found["columns"], row)) for row in found["data"]]


def of_mlflow(here: Path) -> Iterator[tuple[str, Rows]]:
    for path in here.rglob("step_*.json"):
        found = json.loads(path.read_text())
        yield path.parent.name, [dict(zip(found["columns"], row)) for row in found["data"]]


def of_trackio(here: Path) -> Iterator[tuple[str, Rows]]:
    (path,) = here.glob("trackio/*.db")
    with sqlite3.connect(path) as database:
        (runs,) = database.execute("select count(distinct run_id) from metrics").fetchone()
        assert runs == 1
        for (logged,) in database.execute("select metrics from metrics order by id"):
            for key, value in json.loads(logged).items():
                if isinstance(value, dict) and value["_type"] == "trackio.table":
                    yield key, value["_value"]


def of_csv(here: Path) -> Iterator[tuple[str, Rows]]:
    for key in NAMES:
        with (here / "run" / "csv" / f"{key}.csv").open(newline="") as file:
            yield key, list(csv.DictReader(file))


def test_the_end_says_where_each_tracker_wrote_and_trackio_ends_once(here: Path) -> None:
    said = (here / "said").read_text()
    assert said.count("Run finished") == 1 and "Resumed existing run" not in said
    (offline,) = here.glob("run/wandb/offline-run-*")
    assert f"wandb         {offline.relative_to(here)}  (" in said
    assert f"mlflow        {here / 'mlflow.db'}  (mlflow ui" in said
    assert "trackio       trackio show --project lit_rl  (run " in said
    assert "csv           run/csv/metrics.csv" in said and (here / "run" / "csv" / "metrics.csv").is_file()


READERS = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio, "csv": of_csv}


@pytest.fixture(scope="module")
def stored(here: Path) -> dict[str, Rows]:
    """By key, what `samples/` holds."""
    tables = list_tables(here / "run" / "samples")
    return {
        key: [row for table in tables if fnmatch(table.name, name) for row in table.read().to_pylist()]
        for key, name in NAMES.items()
    }


def same(shown: Any, value: Any) -> bool:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return shown in (None, "", "NaN", "nan") or (isinstance(shown, float) and math.isnan(shown))
    if isinstance(value, bool):
        return str(shown) == str(value)
    return math.isclose(float(shown), value, rel_tol=1e-6) if isinstance(value, int | float) else shown == value


@pytest.mark.parametrize("tracker", READERS)
@pytest.mark.parametrize("key", NAMES)
def test_every_row_and_column_is_there_uncut(tracker: str, key: str, here: Path, stored: dict[str, Rows]) -> None:
    order = ("step", "completion", "note")
    found = [row for name, rows in READERS[tracker](here) for row in rows if name == key]
    wanted = stored[key]
    assert len(found) == len(wanted) and len({row["step"] for row in found}) == 2 and len(found) >= 6
    assert {"step", "rank", "prompt", "completion", "reward", "rewards/right", "rewards/short", "note"} <= set(
        wanted[0]
    )
    shown = sorted(found, key=lambda row: [str(row[name]) for name in order])
    for row, there in zip(shown, sorted(wanted, key=lambda row: [str(row[name]) for name in order])):
        assert set(row) == set(there)
        assert all(same(row[name], value) for name, value in there.items()), (row, there)
    assert all(len(row["note"]) > 4000 and row["note"].endswith("\n|end|") for row in found)


@pytest.mark.parametrize("key", NAMES)
def test_tensorboard_has_them_as_text(key: str, here: Path, stored: dict[str, Rows]) -> None:
    board = EventAccumulator(str(here / "run"), size_guidance={"tensors": 0})
    board.Reload()
    (tag,) = (tag for tag in board.Tags()["tensors"] if tag.split("/")[0] == key)
    texts = [event.tensor_proto.string_val[0].decode() for event in board.Tensors(tag)]
    lines = [line for text in texts for line in text.splitlines()[2:]]
    assert len(lines) == len(stored[key])
    for row in stored[key]:
        note = row["note"].replace("\n", " ").replace("|", "\\|")
        shown = [line for line in lines if note[:500] in line and note[-500:] in line]
        assert shown and not any(note in line for line in shown), "a cell beyond 4000 characters loses its middle"
