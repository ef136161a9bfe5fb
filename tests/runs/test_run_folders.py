"""What lies in a run directory is kept: a run replaces and removes only what a run wrote, known by its name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from runs_helpers import SMALL, assert_same, interrupted
from safetensors.torch import load_file
from tiers import in_turn

from lit_rl.callbacks.record import RECORD_FILES
from lit_rl.models.verified_folder import _STAGED
from lit_rl.runs.run_dir import REPLACED, RunDir

OVERRIDES = [*SMALL, "trainer.max_steps=2", "callbacks.checkpoint.every_n_train_steps=1"]
ALARMED = [f"callbacks.length_drift.{setting}" for setting in ("first=1", "patience=1", "factor=1.000001")]
BESIDE = ("datasets/train.jsonl", "samples/mine.parquet", "rollouts/notes.pt", "rollouts/step_notes.pt", "csv/a.csv")
"""Files that a run has no use for, beside those that it writes."""


def put(folder: Path, *names: str) -> dict[Path, bytes]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the user's own {name}")
    return contents(folder)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture
def run(train, whole) -> Path:
    """A finished run with a checkpoint after each of its two steps. Made once; copy it."""
    if not whole.exists():
        keep = "callbacks.checkpoint.save_top_k=-1"
        loggers, writers = "logger=[csv,tensorboard]", ["callbacks=preference_sets", "callbacks.export.every=1"]
        alarm = ["+schemas@callbacks.length_drift=LengthDrift", *ALARMED]
        assert train(*OVERRIDES, keep, loggers, *writers, *alarm, f"run_dir={whole}") == 0
    return whole


WITHOUT_TORCH = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "lightning", "transformers"):
            raise AssertionError(f"{name} is loaded")

sys.meta_path.insert(0, Refuses())
from hydra.core.global_hydra import GlobalHydra
from lit_rl import cli
for words in json.loads(sys.argv[1]):
    GlobalHydra.instance().clear()
    sys.argv = ["lit-rl", *words]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as said:
        code = cli.run(words)
    print(json.dumps([code, out.getvalue() + said.getvalue()]))
"""


def test_commands_that_read_files_load_no_torch(run: Path, root: Path, tmp_path: Path) -> None:
    for name in ("a", "twin"):
        shutil.copytree(run, tmp_path / name)
    lines = {
        "report run_dir=a": (0, "a/report.html  (one file"),
        "compare a twin": (0, "a/compare_twin.html  (one file"),
        "transcripts run_dir=a": (0, "a/transcripts.html  ("),
        "report run_dir=b": (2, "run_dir=b is no folder"),
        "compare a b": (2, "b is no folder"),
        "transcripts run_dir=b": (2, "run_dir=b is no folder"),
    }
    (tmp_path / "a" / "report.html").unlink()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps([line.split() for line in lines])]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (line, (code, words)), row in zip(lines.items(), done.stdout.splitlines(), strict=True):
        ended, said = json.loads(row)
        assert (ended, words in said) == (code, True), (line, ended, said)
    assert all((tmp_path / "a" / f"{name}.html").is_file() for name in ("report", "compare_twin", "transcripts"))


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_files_beside_those_of_a_run_stay_when_it_is_resumed(run, train, tmp_path):
    again = tmp_path / "again"
    interrupted(run, again, 1)
    theirs = {again / name: put(again, name)[again / name] for name in BESIDE}
    assert train(*OVERRIDES, f"run_dir={again}", "ckpt_path=last") == 0
    assert theirs.items() <= contents(again).items()


@in_turn(
    name=[
        *("config.yaml", "summary.json", "metrics.jsonl", "samples/step_00000000.parquet", "datasets/pairs.jsonl"),
        "hf/config.json",
    ],
    more=[[], ["ckpt_path=last"]],
)
@pytest.mark.all
def test_files_that_a_run_would_replace_and_no_run_wrote_are_refused(name, more, train, tmp_path, capsys):
    proj = tmp_path / "proj"
    before = put(proj, name)
    assert train(*OVERRIDES, f"run_dir={proj}", *more) == 2
    said = capsys.readouterr().err
    assert name.split("/")[0] in said and "another run_dir" in said and "Traceback" not in said
    assert contents(proj) == before


@pytest.mark.all
def test_a_config_of_the_users_is_not_replaced_by_a_run_that_goes_on_beside_it(run, train, tmp_path, capsys):
    proj = tmp_path / "proj"
    shutil.copytree(run / "checkpoints", proj / "checkpoints")
    before = put(proj, "config.yaml")
    assert train(*OVERRIDES, f"run_dir={proj}", "ckpt_path=last") == 2
    assert "config.yaml" in capsys.readouterr().err and contents(proj) == before


@pytest.mark.all
def test_what_a_run_left_before_its_first_checkpoint_goes_once_the_settings_are_sound(run, train, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(run, again)
    for name in ("checkpoints", "hf"):
        shutil.rmtree(again / name)
    (again / "summary.json").write_text('{"status": "running"}')
    stale = again / "samples" / "step_00000077.parquet"
    shutil.copy(again / "samples" / "step_00000000.parquet", stale)
    theirs = {again / name: put(again, name)[again / name] for name in BESIDE}
    before = contents(again)
    assert train(*OVERRIDES, f"run_dir={again}", "ckpt_path=last", "algo.group_size=1") == 2
    assert contents(again) == before
    assert train(*OVERRIDES, f"run_dir={again}", "ckpt_path=last", "debug=fdr") == 0
    assert contents(again) == before
    assert train(*OVERRIDES, f"run_dir={again}", "ckpt_path=last") == 0
    assert not stale.exists() and theirs.items() <= contents(again).items()


@pytest.mark.all
def test_every_file_that_a_run_writes_is_known_by_its_name(run):
    """A new writer has to be added to `REPLACED`, and to `FILES` if it writes while the policy trains."""
    names = [str(path.relative_to(run)) for path in contents(run)]
    known = ("config.yaml", *REPLACED, "hf/*", "hparams.yaml", "csv/hparams.yaml")  # loggers: never over another's
    assert not [name for name in names if not any(fnmatch(name, pattern) for pattern in known)]
    of_many = [pattern for pattern in RECORD_FILES if "]-[" in pattern]  # of more than a hundred: test_sample_files.py
    assert all(any(fnmatch(name, pattern) for name in names) for pattern in RECORD_FILES if pattern not in of_many)


# ---------------------------------------------------------------------- damaged checkpoints


@pytest.mark.parametrize("task", ["fit", "eval"])
def test_a_damaged_only_checkpoint_is_an_error_that_names_it(task, run, train, tmp_path, capsys):
    again = tmp_path / "again"
    interrupted(run, again, 1)
    only = again / "checkpoints" / "step_00000001.ckpt"
    damage(only)
    before = contents(again)
    assert train(*OVERRIDES, f"run_dir={again}", "ckpt_path=last", f"task={task}") == 7
    said = capsys.readouterr().err
    assert str(only) in said and "start anew" in said and "Traceback" not in said
    assert contents(again) == before
    if task == "fit":  # what the message says helps
        only.unlink()
        assert train(*OVERRIDES, f"run_dir={again}", "ckpt_path=last") == 0
        assert "starting anew" in capsys.readouterr().out


def test_an_older_whole_checkpoint_is_taken_and_said_so_in_one_line(run, train, tmp_path, capsys):
    again = tmp_path / "again"
    interrupted(run, again, 2)
    newest = again / "checkpoints" / "step_00000002.ckpt"
    damage(newest)
    assert train(*OVERRIDES, f"run_dir={again}", "ckpt_path=last") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Damaged")]
    assert_same(load_file(again / "hf" / "model.safetensors"), load_file(run / "hf" / "model.safetensors"))
    assert str(newest) in line and "step_00000001.ckpt" in line


@pytest.mark.all
def test_exports_in_between_are_those_of_their_steps(run, tmp_path):
    """That of the last step is the run's own. One that a process left half-written goes before the run goes on."""
    steps = run / "hf_steps"
    assert sorted(path.name for path in steps.iterdir()) == ["step_00000001", "step_00000002"]
    first, last, own = (
        load_file(folder / "model.safetensors")
        for folder in (steps / "step_00000001", steps / "step_00000002", run / "hf")
    )
    assert_same(last, own)
    saved = torch.load(run / "checkpoints" / "step_00000001.ckpt", weights_only=True)["state_dict"]
    trained = {name.removeprefix("policy."): tensor for name, tensor in saved.items()}
    assert_same(first, {name: trained[name] for name in first})
    assert "step 1" in (steps / "step_00000001" / "README.md").read_text()
    half = tmp_path / "hf_steps" / f".step_00000003{_STAGED}77"
    half.mkdir(parents=True)
    RunDir(tmp_path).remove_partial()
    assert not half.exists()
