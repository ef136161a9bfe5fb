"""One table of what is refused, `refusals.yaml`: by settings, by who builds, by constructors, by every door."""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import shlex
import subprocess
import sys
from functools import partial
from importlib import import_module
from math import inf, nan
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import warm
import yaml
from cli_helpers import Command, contents, refused
from tiers import quick

import lit_rl
from lit_rl import cli
from lit_rl.core import errors
from lit_rl.data import recipes

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


def exit_code(error: str) -> int:
    return 0 if error == "none" else getattr(errors, error).exit_code


def rows(part: str) -> dict[str, tuple[int, list[str]]]:
    """Command lines, each with its exit code and what the message has in it."""
    return {line: (exit_code(error), says) for error, told in TABLE[part].items() for line, says in told.items()}


OWN = {
    "listed": b"# @package _global_\n- a\n",
    "latin": b"# @package _global_\nrun_dir: \xe9\n",
    "text": b"# @package _global_\ndefaults: algo\n",
    "here": b"defaults:\n  - override /algo: rloo\n",
    "added": b"# @package _global_\ndefaults:\n  - algo: dpo\n",
    "tab": b"# @package _global_\ntrainer:\n\tmax_steps: 1\n",
}
"""Files of one's own, with what people get wrong in them."""

WITHOUT_TORCH = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise AssertionError("torch is loaded")

sys.meta_path.insert(0, Refuses())
import pytest, quick_configs
quick_configs.install(pytest.MonkeyPatch())
from hydra.core.global_hydra import GlobalHydra
from lit_rl import cli
for line in json.loads(sys.argv[1]):
    said = io.StringIO()
    GlobalHydra.instance().clear()
    sys.argv = ["lit-rl", *line.split()]
    with redirect_stderr(said), redirect_stdout(said):
        code = cli.run(line.split())
    print(json.dumps([code, said.getvalue()]))
"""


@pytest.mark.all
def test_what_needs_no_torch_is_refused_without_it(root: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompts, completions):\n    return [0.0]\n")
    (tmp_path / "nine.jsonl").touch()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "odd.jsonl").write_text('{"prmpt": "1+1=", "answer": "2"}\n')
    (tmp_path / "finished").mkdir()
    run = dict.fromkeys(("algo", "data", "run_dir", "task", "trainer"))
    (tmp_path / "finished" / "config.yaml").write_text(json.dumps(run))
    (tmp_path / "finished" / "summary.json").write_text('{"status": "finished"}')
    experiments = tmp_path / "own" / "experiment"
    experiments.mkdir(parents=True)
    for name, text in OWN.items():
        (experiments / f"{name}.yaml").write_bytes(text)
    path = [str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "none")}
    early = rows("early")
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(list(early))]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    composed = 0
    for (line, (code, says)), row in zip(early.items(), done.stdout.splitlines(), strict=True):
        ended, said = json.loads(row)
        assert (ended, [words for words in says if words not in said]) == (code, []), f"{line}: {ended}: {said}"
        assert "loading torch" not in said
        composed += "composing the config ..." in said
    assert composed > len(early) / 2, "what takes a second is said"
    assert {path.name for path in tmp_path.iterdir()} == {
        *("mine.py", "nine.jsonl", "prompts.jsonl", "odd.jsonl", "finished", "own")
    }


def test_words_alone_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = list[str]()
    for line, (code, says) in rows("words").items():
        monkeypatch.setattr(sys, "argv", ["lit-rl", *line.split(" ")])
        ended, said = cli.run(line.split(" ")), capfd.readouterr().err
        if ended != code or any(words not in said for words in (*says, "Error: ")):
            wrong.append(f"{line}: {ended}: {said}")
        assert "composing" not in said and "Traceback" not in said and "usage:" not in said, said
    assert not wrong, "\n".join(wrong)
    assert contents(tmp_path) == []


QUICK_ROWS = {
    *("algo.group_size=1", "trainer.max_steps=-1 trainer.max_epochs=-1 trainer.max_time=null", "data=jsonl"),
    *("trainer.precision=16-true trainer.accelerator=cpu", "model.dtype=float16", "algo/kl_control=adaptive"),
}
"""One of each way to be refused: by a constructor, by what is missing, by what the machine lacks."""


@pytest.mark.parametrize("line", quick(rows("later"), QUICK_ROWS))
def test_what_is_told_by_who_builds_writes_nothing(step: Command, cwd: Path, line: str) -> None:
    code, says = rows("later")[line]
    refused(step(*line.split()), code, *says)
    assert contents(cwd) == []


@pytest.mark.parametrize("line", quick(rows("commands"), {"doctor doctor.prompt=1", "serve model=tiny algo=dpo"}))
def test_a_command_that_looks_into_a_config_refuses(command: Command, cwd: Path, line: str) -> None:
    code, says = rows("commands")[line]
    refused(command(*line.split()), code, *says)
    assert contents(cwd) == []


PLACES = """
algorithms rewards callbacks rewards.contract rewards.judge_rewards generation environments data.example_formats
data.message_forms data.rows data.tasks data.curriculum data.example_reader data.loaders data.order
data.supervised_text core.rollout models.critics models.references environments.games
environments.gymnasium_environment generation.hf generation.native generation.vllm.client
generation.vllm.engine_settings generation.vllm.server algorithms.evaluation.validation algorithms.optim.optimizers
algorithms.optim.schedules algorithms.optim.strategies algorithms.terms.credit algorithms.terms.groups
algorithms.terms.regularizers algorithms.terms.verdict_terms ops.advantages ops.engine_mismatch ops.policy_losses
ops.preference_losses ops.returns ops.selection
"""
"""Modules whose names a line of Python in the table may use; `lit_rl` itself comes first."""


def names() -> dict[str, Any]:
    """All that a line of the table may use: what `PLACES` hold, and rows, pairs, messages and two prompts."""
    prompt, two = {"prompt": "1+1="}, (["p", "p"], ["a", "b"], ["c", "d"])
    found: dict[str, Any] = {"ROWS": [prompt | {"answer": "2"}], "PAIRS": [prompt | {"chosen": "2", "rejected": "3"}]}
    found |= {role: lambda content, role=role: {"role": role, "content": content} for role in ("user", "assistant")}
    found |= {"TWO": two, "recipes": recipes, "pathlib": pathlib, "peft": peft, "torch": torch}
    found |= {"inf": inf, "nan": nan, "partial": partial}
    for place in (lit_rl, *(import_module(f"lit_rl.{name}") for name in PLACES.split())):
        there = {name: getattr(place, name) for name in dir(place) if name not in found}
        found |= {name: value for name, value in there.items() if not inspect.ismodule(value)}
    return found


@pytest.mark.parametrize("package", TABLE["constructors"])
def test_a_constructor_refuses(package: str) -> None:
    known, wrong = names(), list[str]()
    for error, told in TABLE["constructors"][package].items():
        for line, says in told.items():
            try:
                got = eval(line, known)
            except Exception as refusal:
                got = refusal
            if not isinstance(got, getattr(errors, error)) or any(words not in str(got) for words in says):
                wrong.append(f"{line}: {got!r}")
    assert not wrong, "\n".join(wrong)


DOORS = pytest.mark.parametrize("row", TABLE["doors"], ids=lambda row: row["typed"])


@DOORS
def test_the_constructor_of_a_door_refuses(row: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError) as refusal:
        eval(row["python"], names())
    assert [words for words in row["says"] if words not in str(refusal.value)] == [], str(refusal.value)


LEAST = [
    *("--model=GRPO", "--model.model=tiny", "--model.reward=lit_rl.rewards.exact_match"),
    "--data.task=lit_rl.data.tasks.Addition",
]


@pytest.mark.all
@DOORS
def test_lightnings_command_line_refuses(row: dict[str, Any], command: Command) -> None:
    refused(command("fit", *LEAST, *shlex.split(row["lightning"])), 2, *row["says"])


SEEN = {"--model.group_sizee=1", "--model.beta=abc", "--config=nope.yaml", "--model.learning_rate=1"}


@pytest.mark.parametrize("line", quick(rows("lightning"), SEEN))
def test_a_mistake_on_lightnings_command_line_is_one_sentence(line: str, command: Command, cwd: Path) -> None:
    code, says = rows("lightning")[line]
    outcome = command("validate", *LEAST, *shlex.split(line))
    refused(outcome, code, *says)
    (said,) = [each for each in outcome.err.splitlines() if "Error: " in each]
    assert "usage:" not in outcome.err and "<class" not in said and "Import path" not in said
    assert contents(cwd) == []


@pytest.mark.all
def test_train_py_refuses(root: Path, command: Command, cwd: Path) -> None:
    """The first in a process of its own."""
    for row in TABLE["doors"]:
        refused(command(row["typed"]), 2, *row["says"])
    first = TABLE["doors"][0]
    done = warm.run([sys.executable, str(root / "train.py"), first["typed"]], cwd=cwd, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert [words for words in first["says"] if words not in done.stderr] == [], done.stderr
    assert contents(cwd) == []
