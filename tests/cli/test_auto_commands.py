"""Commands without a Trainer under `trainer.precision=auto`: the type that a run's policy would have on this device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cli_helpers import Command

import lit_rl.cli.trainer_settings as auto
from lit_rl.cli import model_commands

LOCAL = ["model=local", "model.name=tiny"]
"""The shipped policy without what its YAML recommends: its precision is then the default's."""


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What doctor and serve were asked to do; they do not do it."""
    asked: list[Any] = []
    monkeypatch.setattr(model_commands, "doctor", lambda job: asked.append(job) or 0)
    monkeypatch.setattr(model_commands, "serve", lambda job: asked.append(job) or 0)
    return asked


@pytest.fixture
def held(command: Command, jobs: list[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The type of the model of a command, where the processor multiplies bfloat16 in hardware or does not."""

    def run(units: bool, *words: str) -> str:
        monkeypatch.setattr(auto, "multiplies_bfloat16", lambda device: units)
        outcome = command(*words)
        assert outcome.code == 0, outcome.err
        return jobs[-1].model.dtype

    return run


@pytest.mark.parametrize("word", ["doctor", "serve"])
def test_the_device_decides_where_nothing_was_said(held, word):
    assert held(True, word, *LOCAL) == "bfloat16" and held(False, word, *LOCAL) == "float32"
    assert held(True, word, *LOCAL, "model.dtype=float32") == "float32"
    assert held(True, word, "model=tiny") == "float32"
    assert held(False, word, "model=tiny", "model.dtype=bfloat16") == "bfloat16"


def test_nothing_but_the_model_is_narrow(held, jobs):
    held(True, "doctor", *LOCAL)
    assert jobs[-1].fabric._precision.precision == "32-true"
