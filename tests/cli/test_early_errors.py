"""What needs no torch to be refused is refused without it, in the words of who would have refused it later."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lit_rl.cli import early, hydra_app, hydra_start, schemas, stored_schemas
from lit_rl.errors import ConfigError, DataError
from lit_rl.named import check_function
from lit_rl.rewards.functions.by_path import load_function

REFUSED = {
    "optimizer.lr=fast": (2, "optimizer.lr: Value 'fast' of type 'str' could not be converted to Float"),
    "algo.group_size=two": (2, "algo.group_size: Value 'two' of type 'str' could not be converted to Integer"),
    "trainer.max_steps=few": (2, "trainer.max_steps: Value 'few'"),
    "algo.loss=cispo": (2, "write algo/loss=cispo"),
    "seed=-1": (2, "seed=-1 is out of range"),
    "data.path=none.jsonl": (3, "data.path=none.jsonl: no such file or folder. Did you mean 'nine.jsonl'?"),
    "data=jsonl data.path=none.jsonl": (3, "data.path=none.jsonl: no such file or folder."),
    "reward=./nowhere.py:score": (2, "reward.fn: there is no file"),
    "reward=./mine.py:scor": (2, "reward.fn='./mine.py:scor': there is no 'scor'. There are: score."),
    "model=./nowhere": (2, "model.name='./nowhere' is written as a path, and there is no such folder"),
    "ckpt_path=none.ckpt": (2, "ckpt_path=none.ckpt does not exist."),
    "run_dir=mine.py": (7, "run_dir=mine.py is a file"),
    "run_dir=finished": (2, "run_dir=finished holds a finished run."),
    "report run_dir=nowhere": (2, "run_dir=nowhere is no folder"),
}
"""A command line, with its exit code and what it says."""

WITHOUT_TORCH = """
import io, json, sys
from contextlib import redirect_stderr

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise AssertionError("torch is loaded")

sys.meta_path.insert(0, Refuses())
from hydra.core.global_hydra import GlobalHydra
from lit_rl import cli
for line in json.loads(sys.argv[1]):
    said = io.StringIO()
    GlobalHydra.instance().clear()
    sys.argv = ["lit-rl", *line.split()]
    with redirect_stderr(said):
        code = cli.run(line.split())
    print(json.dumps([code, said.getvalue()]))
"""


def test_what_needs_no_torch_is_refused_without_it(root: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompts, completions):\n    return [0.0]\n")
    (tmp_path / "nine.jsonl").touch()
    (tmp_path / "finished").mkdir()
    run = dict.fromkeys(("algo", "data", "run_dir", "task", "trainer"))
    (tmp_path / "finished" / "config.yaml").write_text(json.dumps(run))
    (tmp_path / "finished" / "summary.json").write_text('{"status": "finished"}')
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(list(REFUSED))]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (line, (code, words)), row in zip(REFUSED.items(), done.stdout.splitlines(), strict=True):
        ended, said = json.loads(row)
        assert (ended, words in said) == (code, True), f"{line}: {ended}: {said}"
        assert "composing the config ..." in said and "loading torch" not in said
    assert {path.name for path in tmp_path.iterdir()} == {"mine.py", "nine.jsonl", "finished"}


def test_beside_other_processes_the_run_s_folder_and_checkpoint_are_left_to_where_they_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 tells them that it fails, and a checkpoint may be on its machine alone; data is looked at by each."""
    (tmp_path / "taken").touch()
    config = OmegaConf.create({"task": "fit", "run_dir": str(tmp_path / "taken"), "ckpt_path": "none.ckpt"})
    config.data = {"_target_": "lit_rl.data.datamodule.RolloutDataModule", "path": None}
    monkeypatch.setenv("RANK", "0")
    early.check(config)
    config.data.path = "none.jsonl"
    with pytest.raises(DataError, match="no such file or folder"):
        early.check(config)


def test_a_schema_comes_back_as_the_constructor_made_it() -> None:
    for name, node in schemas.every().items():
        again = stored_schemas.restored(name, stored_schemas.stored(node))
        assert _fields(again) == _fields(node), name


def _fields(node: Any) -> list[object]:
    return [
        (field.name, _fields(field.type) if dataclasses.is_dataclass(field.type) else field.type, _default(field))
        for field in dataclasses.fields(node)
    ]


def _default(field: dataclasses.Field) -> object:
    made = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    return repr(field.default if made is None else type(made) if dataclasses.is_dataclass(made) else made)


def test_schemas_of_another_lightning_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_schemas, "versions", lambda: {"lightning": "99.0"})
    assert not stored_schemas.register.__wrapped__()


def test_every_task_has_something_that_runs_it() -> None:
    assert set(hydra_start.TASKS) == {*hydra_app.TASKS, *hydra_app._WITHOUT_A_RUN, "replay"}


@pytest.mark.parametrize(
    "text",
    [
        "from elsewhere import *",
        "import elsewhere as score",
        "globals()['score'] = print",
        "for score in (1, 2): pass",
        "def __getattr__(name): ...",
        "if True:\n    def score(): ...",
        "this is no Python",
    ],
)
def test_a_file_that_may_have_the_name_is_left_to_the_import(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    check_function(f"{tmp_path / 'mine.py'}:score", "reward.fn")


@pytest.mark.parametrize("path", ["mine.py:scor", "none.py:score"])
def test_the_early_message_is_the_late_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(): ...\nclass Other: ...\ndef _hidden(): ...\n")
    said = []
    for look in (check_function, load_function):
        with pytest.raises(ConfigError) as refused:
            look(path, "reward.fn")
        said.append(str(refused.value))
    assert said[0] == said[1]
