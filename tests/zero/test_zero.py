"""The real DeepSpeed over two processes: the weights, metrics and exports of one process, and exact resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_runs
from dist_equal import Ones, assert_equal_runs, assert_same_weights, in_processes, left
from runs_helpers import rows
from safetensors.torch import load_file

from lit_rl.callbacks.checkpoint_io import is_whole
from lit_rl.core.durable_files import MANIFEST
from lit_rl.runs.run_dir import RunDir

pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left behind."""
    return in_processes(zero_runs.__file__, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Ones:
    return Ones(zero_runs.run, tmp_path_factory.mktemp("one"))


EACH = [(where, name) for where, (_, names, _) in zero_runs.JOBS.items() for name in names]


@pytest.mark.parametrize(("where", "name"), EACH)
def test_two_processes_with_micro_batches_learn_as_one(where, name, two, one):
    found = left(two / where, name)
    assert_equal_runs(one(name), found, share=1e-4, beyond=2e-6, moved=1e-3)
    assert found["gathered"], "in the middle of the fit the whole weights were other ones"
    if where.startswith("zero3"):
        assert found["apart"] > 0, "no weight was ever apart, so nothing was gathered"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_gathered_once_a_rollout(stage, two):
    found = left(two / f"zero{stage}", "grpo")
    rollouts_and_a_validation = zero_runs.STEPS + 1
    assert found["gathered_times"] == found["apart"] == (rollouts_and_a_validation if stage == 3 else 0)


def test_gradients_are_clipped_and_their_norms_are_from_before(two, one):
    for stage in (1, 2, 3):
        assert left(two / f"zero{stage}", "grpo")["metrics"]["train/grad_norm"] > 2 * zero_runs.LIMIT


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_steps_without_a_finite_gradient_are_left_out_and_counted(stage, two):
    """So are those of rollouts without any reward, which is no fault: weights and moments are compared above."""
    per_step = left(two / f"zero{stage}", "grpo-left-out")["steps"]
    assert [step["train/skipped_steps"] for step in per_step] == [0, 0, 1, 0]
    norms = [step["train/grad_norm"] for step in per_step]
    assert norms[0] > 0 and norms[1] == 0 and math.isnan(norms[2]) and norms[3] > 0


@pytest.mark.parametrize("stage", [2, 3])
def test_space_for_a_checkpoint_is_looked_for_before_any_is_used(stage, two):
    """With nine tenths of what it takes every rank refuses, and nothing of it is there; a tenth more is enough."""
    folder = two / f"room{stage}"
    for told in left(folder, "room"):
        assert list(told) == [0.9] and "could not be written" in told[0.9] and "MB are free" in told[0.9]
    assert sorted(path.name for path in folder.glob("*ckpt*")) == ["1.1.ckpt", "first.ckpt"]


def test_nodes_that_do_not_see_one_folder_are_refused_before_a_step(two):
    """On every rank, and nothing stays there. Those that see it train, and save the parts of both."""
    for told in left(two / "nodes", "nodes"):
        assert list(told) == ["apart"] and "strategy=deepspeed_2" in told["apart"]
        assert "cannot see what rank 0 writes into" in told["apart"]
        assert "Every node must see the same folder" in told["apart"]
    assert [path.name for path in sorted((two / "nodes" / "apart").rglob("*"))] == ["node0", "node1"]
    saved = two / "nodes" / "shared" / "node0" / "checkpoints" / "last.ckpt" / "checkpoint"
    assert len(list(saved.glob("*optim_states.pt"))) == 2


@pytest.mark.parametrize("name", zero_runs.WHOLE_RUNS)
def test_a_run_that_is_gone_on_with_is_the_uninterrupted_one(name, two):
    """From the middle of a rollout, to the bit; what a checkpoint holds reads as plain values."""
    whole, again = two / f"whole-{name}", two / f"again-{name}"
    assert rows(whole) == rows(again) and len(rows(whole)) > 2
    first, second = exported(whole), exported(again)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    checkpoint = held(whole, 3)
    names = set(checkpoint["module"])
    assert names and not any(key.startswith("reference_policy") for key in names)
    if name in ONLINE:
        mine, other = (rank["module"]["rollout"]["completions"]["response_ids"] for rank in checkpoint["lit_rl"])
        assert mine.shape != other.shape or not torch.equal(mine, other)


def test_of_a_folder_without_its_manifest_nothing_is_taken(two):
    """`ckpt_path=last` goes on from the one before."""
    run_dir = RunDir(two / "again-ppo")
    newest = run_dir.last_checkpoint()
    assert newest is not None and newest.is_dir()
    lost = (newest / MANIFEST).rename(two / MANIFEST)
    older, damaged = run_dir.newest_checkpoint()
    assert older is not None and older.name == "step_00000003.ckpt" and damaged == [newest]
    lost.rename(newest / MANIFEST)
    assert run_dir.last_checkpoint() == newest


ONLINE = ("rloo", "ppo", "grpo")


@pytest.mark.parametrize("name", ONLINE)
def test_what_is_exported_is_what_one_process_exports(name, two, tmp_path):
    zero_runs.command(name, tmp_path / "one", alone=True)
    first, second = exported(tmp_path / "one"), exported(two / f"whole-{name}")
    # AdamW divides by the gradient, and so enlarges roundings.
    assert_same_weights(first, second, share=0.02, beyond=1e-4, moved=0.1)
    summary = (two / f"whole-{name}" / "summary.json").read_text()
    assert "tensors reloaded, largest difference 0" in summary


def test_sigterm_to_one_rank_ends_all_with_a_whole_checkpoint(two):
    """In a rollout at stage 3, while weights are whole. That both end with the signal's code is asked there."""
    run = two / "signalled"
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped"
    assert not (run / "error.json").exists()
    saved = sorted((run / "checkpoints").glob("*.ckpt"))
    assert saved[-1].name == "step_00000002.ckpt" and is_whole(saved[-1])


def exported(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "hf" / "model.safetensors")


def held(run_dir: Path, step: int) -> dict[str, Any]:
    """What rank 0 wrote at a step, read without running code."""
    folder = run_dir / "checkpoints" / f"step_{step:08d}.ckpt" / "checkpoint"
    return torch.load(next(folder.glob("*mp_rank_00_model_states.pt")), weights_only=True)
