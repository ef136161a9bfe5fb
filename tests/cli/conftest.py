"""The command line in this process: starting Python and torch anew costs seconds a run."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.utilities.seed import isolate_rng

import lit_rl.cli

MINUTE = [
    "trainer.accelerator=cpu",
    "trainer.devices=1",
    "trainer.max_steps=1",
    "trainer.max_time=00:00:01:00",
    "trainer.limit_val_batches=1",
    "algo.group_size=2",
    "sampling.max_new_tokens=6",
    "data.prompts_per_rollout=2",
    "logger=none",
]
"""One optimizer step of four completions, validated on one batch."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    def __contains__(self, text: str) -> bool:
        return text in self.err


Command = Callable[..., Outcome]


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
        with warnings.catch_warnings(), isolate_rng():
            code = lit_rl.cli.run(list(arguments))
        said = capsys.readouterr()
        return Outcome(code, said.out, said.err)

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
    return lambda *arguments: command(*MINUTE, *arguments)


def refused(outcome: Outcome, code: int, *words: str) -> None:
    """The exit code, every word in the message, and no traceback."""
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err, f"{word!r} is not in: {outcome.err}"


def contents(folder: Path) -> list[str]:
    """Everything below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def metrics(run_dir: Path) -> dict[str, Any]:
    """The last value of everything that a run logged."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {key: value for row in rows for key, value in row.items()}
