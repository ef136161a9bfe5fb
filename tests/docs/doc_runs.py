"""Runs of the command line in this process."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.utilities.seed import isolate_rng

from lit_rl import cli

SMALL = ["trainer.max_steps=1", "eval.limit=4", "sampling.max_new_tokens=6", "callbacks.samples.print=0"]
"""One optimizer step, validated on four prompts."""

_FEW = {
    "experiment=guess_sft": ["data.task.games=40"],
    "experiment=frozen_lake_sft": ["data.task.games=40"],
    "experiment=calculator_sft": ["data.task.max_operand=30"],
}


def few_rows(words: Sequence[str]) -> list[str]:
    """Settings of a command that take few of the rows that are computed: to encode all takes longer than a step."""
    own = ("data=", "data.path=", "data.task.", "experiment=", "trainer.val_check_interval=")  # of so many batches
    if not any(word.startswith(own) for word in words):
        return ["data.task.max_operand=30", "data.task.val_rows=8"]  # the shipped sums
    return [setting for word in words for setting in _FEW.get(word, ())]


@contextlib.contextmanager
def left_as_found() -> Iterator[None]:
    """Hydra's singletons, `sys.argv`, the environment, the root logger and the random numbers as they were."""
    argv, environment, root = sys.argv, dict(os.environ), logging.getLogger()
    handlers, level = list(root.handlers), root.level
    for name in ("LIT_RL_RUN_DIR", "LOCAL_RANK"):
        os.environ.pop(name, None)
    GlobalHydra.instance().clear()
    try:
        with warnings.catch_warnings(), isolate_rng():
            yield
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
        root.handlers[:], root.level = handlers, level
        GlobalHydra.instance().clear()


def script(root: Path, name: str) -> ModuleType:
    """A file of `scripts/`, imported; its neighbours can be imported by name meanwhile."""
    spec = importlib.util.spec_from_file_location(name, root / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(root / "scripts"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(root / "scripts"))
    return module


def alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder the current one, without a hub."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return folder


def running(program: str) -> Callable[..., int]:
    """`running("train.py")(*arguments)` is `python train.py *arguments` in this process; returns the exit code."""

    def run(*arguments: str) -> int:
        with left_as_found():
            sys.argv = [program]
            return cli.run(list(arguments))

    return run
