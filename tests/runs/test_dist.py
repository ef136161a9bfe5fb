"""Two real processes do what one does: the same gradients, rollouts, metrics and exports."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from runs_helpers import SMALL, newest, rows
from safetensors.torch import load_file
from tiers import all_but_exhaustive

pytestmark = pytest.mark.dist

# Plain SGD: the change of a weight is its gradient times the learning rate, so equal weights are equal gradients.
SGD = [
    "optimizer=by_path",
    "optimizer.path=torch.optim.SGD",
    "optimizer.lr=0.3",
    "scheduler=constant",
    "trainer.max_steps=4",
]
SHAPES = {
    "plain": [],
    "kl-and-accumulation": [
        *("algo.beta=0.2", "reference=frozen_copy", "trainer.accumulate_grad_batches=2"),
        *("eval.limit=null", "data.task.val_rows=5", "data.val_batch_size=2"),  # uneven between two processes
    ],
    "sequence-mean": ["algo/reduction=sequence"],
    "batch-normalized": ["algo/advantage=batch_normalized"],
    "rloo": ["algo=rloo"],
}
TWO = ["trainer.accelerator=cpu", "trainer.devices=2"]


def finished(process, run_dir: Path, *overrides: str) -> Path:
    child = process(*SMALL, *overrides, f"run_dir={run_dir}")
    output, _ = child.communicate(timeout=300)
    assert child.returncode == 0, output
    return run_dir


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


FIRST = "kl-and-accumulation"


@pytest.fixture(scope="module")
def ones(tmp_path_factory):
    """`ones(train, shape)`: the folder of the run of one process, made when it is first asked for."""
    made: dict[str, Path] = {}

    def one(train, shape: str) -> Path:
        if shape not in made:
            made[shape] = tmp_path_factory.mktemp("one")
            assert train(*SMALL, *SGD, *SHAPES[shape], f"run_dir={made[shape]}") == 0
        return made[shape]

    return one


@pytest.mark.parametrize("shape", all_but_exhaustive(SHAPES, [FIRST]))
def test_ddp_equals_one_process(shape, process, train, ones, tmp_path):
    finished(process, tmp_path / "two", *SGD, *SHAPES[shape], "strategy=ddp", *TWO)
    assert_close_runs(ones(train, shape), tmp_path / "two")


@pytest.mark.all
def test_fsdp_with_a_reference_matches_one_process_and_exports(process, train, ones, tmp_path):
    two = finished(process, tmp_path / "two", *SGD, *SHAPES[FIRST], "strategy=fsdp", *TWO)
    assert_close_runs(ones(train, FIRST), two)

    exported, saved = load_file(two / "hf" / "model.safetensors"), newest(two)["state_dict"]
    assert exported and all(torch.equal(tensor, saved[f"policy.{name}"]) for name, tensor in exported.items())
    assert "largest difference 0" in json.loads((two / "summary.json").read_text())["export"]


@pytest.mark.exhaustive  # in every run test_dist_resumed resumes both, with more that has a state
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_resume_exactly(strategy, process, tmp_path):
    overrides = [
        f"strategy={strategy}",
        *TWO,
        "algo.minibatches=2",
        "trainer.max_steps=4",
        "callbacks.checkpoint.every_n_train_steps=1",
        "callbacks.checkpoint.save_top_k=-1",
    ]
    whole = finished(process, tmp_path / "whole", *overrides)
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    (again / "summary.json").unlink()
    shutil.rmtree(again / "hf")
    (again / "checkpoints" / "step_00000004.ckpt").unlink()
    assert max(p.name for p in (again / "checkpoints").iterdir()) == "step_00000003.ckpt"  # the middle of a rollout
    finished(process, again, *overrides, "ckpt_path=last")
    first, second = newest(whole), newest(again)
    for name, tensor in first["state_dict"].items():
        assert torch.equal(tensor, second["state_dict"][name]), name
    trained = [[row for row in rows(run) if "train/reward" in row] for run in (whole, again)]
    assert trained[0] == trained[1]
