"""A run that another number of processes goes on with: from the end of a rollout it is the uninterrupted run."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import dist_equal
import dist_jobs
import dist_worlds
import pytest
import torch
from dist_equal import left
from dist_worlds import HALF, STEPS, WHOLE
from runs_helpers import assert_same
from torch import nn

from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.core.errors import StorageError
from lit_rl.models.sharding import full_state_dict

pytestmark = [pytest.mark.dist, pytest.mark.all]

assert_equal_runs = partial(dist_equal.assert_equal_runs, share=2e-4, beyond=2e-6, moved=1e-4)


@pytest.fixture(scope="module")
def two(two_ranks: Path) -> Path:
    """What two processes left behind."""
    return two_ranks / "worlds" / "two"


@pytest.fixture(scope="module")
def one(two_ranks: Path) -> Path:
    """What one process left before they began, and leaves now."""
    return two_ranks / "worlds" / "one"


def saved(folder: Path, name: str, step: int) -> dict[str, Any]:
    return torch.load(folder / name / f"step={step}.ckpt", weights_only=True)


def assert_began_with(run: Any, checkpoint: dict[str, Any]) -> None:
    """The weights, their averages and the optimizer's numbers of the checkpoint, bit for bit."""
    trained = {name.removeprefix("policy."): tensor for name, tensor in checkpoint["state_dict"].items()}
    assert_same(run["begun"]["weights"], {name: trained[name] for name in run["begun"]["weights"]})
    (optimizer,) = checkpoint["optimizer_states"]
    before = [
        optimizer["state"][number]["momentum_buffer"]
        for group in optimizer["param_groups"]
        for number in group["params"]
    ]
    assert_same(list(run["begun"]["momentum"].values()), before)
    assert set(run["begun"]["averages"]) == {"EMAWeights", "BEMAWeights"}
    for name, kinds in run["begun"]["averages"].items():
        assert_same(kinds, {kind: checkpoint["callbacks"][name][kind] for kind in kinds})
        moved = (
            kinds[kind][each] - checkpoint["state_dict"][f"policy.{each}"] for kind in kinds for each in kinds[kind]
        )
        assert any(float(apart.abs().max()) > 1e-4 for apart in moved), "an average that lags behind the weights"


def test_one_process_goes_on_where_two_ended_a_rollout(two: Path, one: Path) -> None:
    start = two / "grpo" / f"step={WHOLE}.ckpt"
    dist_worlds.run("grpo", one, 1, start=start, label="from-two")
    whole, again = left(two, "grpo"), left(one, "from-two")
    assert_began_with(again, saved(two, "grpo", WHOLE))
    assert again["steps"] == STEPS and again["rows"] == whole["rows"][1:]
    assert_equal_runs(whole, again)


def test_two_processes_go_on_where_one_ended_a_rollout(two: Path, one: Path) -> None:
    whole, again = left(one, "grpo"), left(two, f"grpo-from-{WHOLE}")
    assert_began_with(again, saved(one, "grpo", WHOLE))
    assert again["steps"] == STEPS and again["rows"] == whole["rows"][1:]
    assert_equal_runs(whole, again)


def test_two_processes_that_hold_parts_go_on_where_one_ended_a_rollout(two: Path, one: Path) -> None:
    again = left(two, "grpo-sharded")
    assert_began_with(again, saved(one, "grpo", WHOLE))
    assert_equal_runs(left(one, "grpo"), again)


def test_numbers_of_an_optimizer_that_would_mean_other_weights_are_refused(tmp_path: Path) -> None:
    """Of two weights the second one is trained: FSDP2 has it as number 1, and others as 0."""
    strategy, model = FSDP2Strategy(), nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    strategy.model, strategy.optimizers = model, [torch.optim.SGD(model[1].parameters(), momentum=0.9)]
    path, state = tmp_path / "a.ckpt", strategy.optimizers[0].state_dict()
    with pytest.raises(StorageError, match="without FSDP2 .* model.name=<run_dir>/hf"):
        strategy._check_numbers(path, [state])
    state["param_groups"][0]["params"] = [1]
    strategy._check_numbers(path, [state])


def test_a_checkpoint_without_the_state_of_our_loader_is_refused() -> None:
    """It does not say how many batches a rollout has."""
    loops = {"fit_loop": {"state_dict": {"combined_loader": [{"position": 3, "epoch": 0, "fingerprint": ""}]}}}
    with pytest.raises(StorageError, match="written by 2 processes and this run has 1.*trainer.devices=2"):
        checkpoints.slots_when_written(loops, 2, 1)


def test_validation_reads_the_weights_of_any_number_of_processes(two: Path, tmp_path: Path) -> None:
    module, data = dist_equal.parts(*dist_worlds.SHAPES["grpo"])
    runner = dist_equal.trainer(tmp_path, 1, limit_val_batches=1)
    start = two / "grpo" / f"step={HALF}.ckpt"
    runner.validate(module, datamodule=data, ckpt_path=start, weights_only=True, verbose=False)
    weights = saved(two, "grpo", HALF)["state_dict"]
    assert all(
        torch.equal(tensor, weights[f"policy.{name}"]) for name, tensor in full_state_dict(module.policy).items()
    )


@pytest.mark.exhaustive
def test_four_processes_go_on_where_two_ended_a_rollout(two: Path, tmp_path: Path) -> None:
    shutil.copy(two / "grpo" / f"step={WHOLE}.ckpt", tmp_path / "start.ckpt")
    folder = dist_equal.in_processes(dist_jobs.__file__, tmp_path, "worlds_of_four") / "worlds_of_four"
    whole, again = left(two, "grpo"), left(folder, "grpo")
    assert_began_with(again, saved(two, "grpo", WHOLE))
    assert again["steps"] == STEPS and again["rows"] == whole["rows"][1:]
    assert_equal_runs(whole, again)


def test_a_rollout_in_use_is_dropped_and_the_next_one_taken(
    two: Path, one: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both ways it is one run: two processes learn as one does, and drop the same."""
    start = two / "grpo" / f"step={HALF}.ckpt"
    with caplog.at_level(logging.INFO):
        dist_worlds.run("grpo", one, 1, start=start, label="half-from-two")
    assert "written by 2 processes, and this run has 1. The rollout in use is dropped after 1 of its 2" in caplog.text
    of_one, of_two = left(one, "half-from-two"), left(two, f"grpo-from-{HALF}")
    assert_began_with(of_one, saved(two, "grpo", HALF))
    assert_began_with(of_two, saved(one, "grpo", HALF))
    assert_equal_runs(of_one, of_two)
    whole = left(two, "grpo")
    for again in (of_one, of_two):
        assert again["steps"] == STEPS and again["epoch"] == whole["epoch"]
        assert [number for number, _ in again["rows"]] == [2, 3]  # steps 3 and 4; step 5
        assert again["rows"][0] == whole["rows"][2], "the prompts of the dropped rollout do not come again"


def test_rows_of_a_data_set_are_gone_on_with(two: Path, one: Path) -> None:
    """The last line of the log is of the steps since."""
    dist_worlds.run("sft", one, 1, start=two / "sft" / f"step={HALF}.ckpt", label="sft-from-two")
    for whole, again in ((left(two, "sft"), left(one, "sft-from-two")), (left(one, "sft"), left(two, "sft-from-one"))):
        rows = {step: rows for step, rows in _steps(whole).items() if step >= HALF}
        assert _steps(again) == rows and len(rows) == STEPS - HALF
        assert_equal_runs(whole, again)


def test_the_shift_of_rewards_is_of_all_processes(two: Path, one: Path) -> None:
    whole, again = left(one, "bco"), left(two, "bco-from-one")
    checkpoint = saved(one, "bco", HALF)
    (of_rank,) = checkpoint["lit_rl"]
    assert_began_with(again, checkpoint)
    assert again["begun"]["shift"]["steps"] == HALF and again["begun"]["shift"]["shift"] != 0
    assert again["begun"]["shift"].items() <= of_rank["module"].items()
    assert_equal_runs(whole, again)


def _steps(run: Any) -> dict[int, list[int]]:
    """The rows of each step: one process has it in two batches."""
    found: dict[int, list[int]] = {}
    for step, rows in run["rows"]:
        found[step] = sorted([*found.get(step, []), *rows])
    return found


def test_one_process_goes_on_where_two_held_parts(two: Path, one: Path) -> None:
    """FSDP2's checkpoint holds whole tensors; actor and critic."""
    dist_worlds.run("ppo", one, 1, start=two / "ppo" / f"step={WHOLE}.ckpt", label="ppo-from-two")
    whole, again = left(two, "ppo"), left(one, "ppo-from-two")
    assert_began_with(again, saved(two, "ppo", WHOLE))
    assert again["rows"] == whole["rows"][1:]
    assert_equal_runs(whole, again)
