"""Two real processes do what one does: the same gradients, rollouts, metrics and exports."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from runs_helpers import SMALL, newest, rows
from safetensors.torch import load_file

pytestmark = pytest.mark.dist

# Plain SGD: the change of a weight is its gradient times the learning rate, so equal weights are equal gradients.
SGD = [
    "optimizer=by_path",
    "optimizer.path=torch.optim.SGD",
    "optimizer.lr=0.3",
    "scheduler=constant",
    "trainer.max_steps=4",
]
RUN = [
    *(*SMALL, *SGD, "algo.beta=0.2", "reference=frozen_copy", "trainer.accumulate_grad_batches=2"),
    *("eval.limit=null", "data.task.val_rows=5", "data.val_batch_size=2"),  # uneven between two processes
]
"""Other terms: test_dist_terms.py."""
TWO = ["trainer.accelerator=cpu", "trainer.devices=2"]


@pytest.fixture
def two(process, tmp_path):
    """`two(strategy)`: the folder of the run of two processes."""

    def run(strategy: str) -> Path:
        child = process(*RUN, f"strategy={strategy}", *TWO, f"run_dir={tmp_path / 'two'}")
        output, _ = child.communicate(timeout=300)
        assert child.returncode == 0, output
        return tmp_path / "two"

    return run


def assert_close_runs(one: Path, two: Path) -> None:
    initial = load_file(Path(os.environ["LIT_RL_TINY"]) / "model.safetensors")
    first, second = newest(one)["state_dict"], newest(two)["state_dict"]
    assert first.keys() == second.keys()
    moved = 0.0
    for name, weight in first.items():
        start = initial.get(name.removeprefix("policy."))
        if start is not None:
            change = (weight - start).norm().item()
            moved = max(moved, change)
            assert (weight - second[name]).norm().item() <= 1e-4 * change + 1e-7, name
    assert moved > 1e-3, "nothing was learned, so nothing was compared"
    for a, b in zip(rows(one), rows(two), strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert value == b[name] or math.isclose(value, b[name], rel_tol=1e-3, abs_tol=1e-5), (name, value, b[name])


@pytest.fixture(autouse=True)
def _tiny(monkeypatch, tiny_dir):
    monkeypatch.setenv("LIT_RL_TINY", str(tiny_dir))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return tmp_path_factory.mktemp("one") / "run"


@pytest.fixture
def one(train, alone):
    """The folder of the run of one process, made once."""
    assert alone.exists() or train(*RUN, f"run_dir={alone}") == 0
    return alone


def test_ddp_equals_one_process(one, two):
    assert_close_runs(one, two("ddp"))


@pytest.mark.all
def test_fsdp_with_a_reference_matches_one_process_and_exports(one, two):
    both = two("fsdp")
    assert_close_runs(one, both)
    exported, saved = load_file(both / "hf" / "model.safetensors"), newest(both)["state_dict"]
    assert exported and all(torch.equal(tensor, saved[f"policy.{name}"]) for name, tensor in exported.items())
    assert "largest difference 0" in json.loads((both / "summary.json").read_text())["export"]
