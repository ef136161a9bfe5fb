"""debug=profile: a trace of the steps that were asked for, of a training that is the same with it and without."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lit_rl.algorithms import GRPO
from lit_rl.callbacks import Profile
from lit_rl.cli import run
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.reports import run_files
from lit_rl.reports.run_page import run_page_html


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def trained(folder: Path, *callbacks: L.Callback, **settings: Any) -> dict[str, torch.Tensor]:
    """Weights after four optimizer steps, two a rollout."""
    module = GRPO("tiny", length, group_size=2, minibatches=2, sampling=Sampling(max_new_tokens=4), beta=0.1)
    data = RolloutDataModule(task=Addition(max_operand=9, val_rows=2), prompts_per_rollout=4)
    quiet: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False, "logger": False}
    trainer = L.Trainer(
        **{
            "accelerator": "cpu",
            "max_steps": 4,
            "limit_val_batches": 0,
            "default_root_dir": folder,
            **quiet,
            **settings,
        },
        callbacks=list(callbacks),
    )
    trainer.fit(module, datamodule=data)
    return module.policy.state_dict()


def events(folder: Path) -> list[str]:
    """Names of what a trace holds, in time."""
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        found = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


def test_the_steps_that_were_asked_for_are_traced_and_training_is_the_same(tmp_path):
    (tmp_path / "config.yaml").write_text("{}\n")
    profile = tmp_path / "profile"
    weights = trained(tmp_path, Profile([2, 4], str(profile)))
    plain = trained(tmp_path)
    assert weights.keys() == plain.keys() and all(torch.equal(weights[name], plain[name]) for name in plain)
    names = events(profile)
    assert names.count("Optimizer.step#AdamW.step") == 2 and "aten::mm" in names
    # Steps 3 and 4 are one rollout, which the trace holds from its beginning.
    phases = [name for name in names if name in ("generate", "reward", "score")]
    assert phases == ["generate", "reward", "score"]
    assert "aten::mm" in (profile / "operators.txt").read_text()
    shown = run_page_html(run_files.RunFiles.of(tmp_path))
    for name in ("trace.json.gz", "operators.txt"):
        assert f'<a href="profile/{name}">' in shown
    assert "<h3>Profile</h3>" not in run_page_html(run_files.RunFiles.of(_without(profile, tmp_path)))


def _without(profile: Path, folder: Path) -> Path:
    for file in profile.iterdir():
        file.unlink()
    return folder


def test_steps_that_begin_within_a_rollout_and_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "profile").write_text("no folder")
    profile = Profile([1, 2], str(tmp_path / "profile"))
    with pytest.warns(UserWarning, match="Profile failed in a trace: FileExistsError"):
        trained(tmp_path, profile, max_steps=2)
    assert profile.unwritten.failures == 1


def test_steps_behind_the_last_are_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"profile.steps=\[3,5\] .*trainer.max_steps=4"):
        trained(tmp_path, Profile([3, 5], str(tmp_path / "profile")))


def test_the_command_line(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    short = ["data.task.max_operand=9", "data.task.val_rows=2", "eval.limit=2", "logger=none", "trainer.max_steps=2"]
    short += ["sampling.max_new_tokens=4", "trainer.accelerator=cpu", "run_dir=run", "callbacks.samples.print=0"]
    assert run(["train", "debug=profile", "profile.steps=[1,2]", *short]) == 0
    assert "profile       run/profile/ (a trace" in capfd.readouterr().out
    assert events(tmp_path / "run" / "profile").count("Optimizer.step#AdamW.step") == 1
    assert 'href="profile/trace.json.gz"' in (tmp_path / "run" / "report.html").read_text()
    assert run(["train", "profile.steps=[1,2]", *short]) == 2
    assert "profile.steps is not a key. debug=profile has it" in capfd.readouterr().err
