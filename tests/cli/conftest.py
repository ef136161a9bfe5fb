"""The command line in this process: starting Python and torch anew costs seconds a run."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import QUICK, Command, Outcome, looked_at
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.utilities.seed import isolate_rng

import lit_rl.cli


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and the current one. Files that a test prepares go beside it or are counted."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def command(
    cwd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clean_logging: None
) -> Command:
    """`command("algo=rloo", "seed=1")` is `lit-rl algo=rloo seed=1` in `cwd`, without a new process."""
    for name in ("LIT_RL_RUN_DIR", "LOCAL_RANK", "HYDRA_FULL_ERROR", "LIT_RL_TRACEBACK", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")  # so that whatever the command sets is undone ...
        monkeypatch.delenv(name)  # ... and it starts from nothing
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Outcome:
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["lit-rl", *arguments])
        capsys.readouterr()
        before = looked_at(cwd)
        with warnings.catch_warnings(), isolate_rng():
            code = lit_rl.cli.run(list(arguments))
        said = capsys.readouterr()
        after = looked_at(cwd)
        touched = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        return Outcome(code, said.out, said.err, tuple(touched))

    return run


@pytest.fixture
def clean_logging() -> Iterator[None]:
    """Hydra configures the root logger and Lightning's; other tests must not feel it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def step(command: Command) -> Command:
    """One optimizer step, quickly."""
    return lambda *arguments: command(*QUICK, *arguments)
