"""Two processes, each with a device of its own: they learn what one process on the CPU learns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dist_equal
import pytest
import same_bits
import torch
import two_ranks
from runs_helpers import SMALL, assert_same

pytestmark = [pytest.mark.all, pytest.mark.xdist_group("two pretended ranks")]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dist_equal.in_processes(two_ranks.__file__, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return `one(method)`: what one process on the CPU leaves, made when it is first asked for."""
    folder, made = tmp_path_factory.mktemp("one"), {}

    def of(method: str) -> Any:
        if method not in made:
            two_ranks.run(method, method, folder, devices=1)
            made[method] = dist_equal.left(folder, method)
        return made[method]

    return of


DRAWN_THERE = ("ppo",)
"""Its fresh head is drawn by the device's generator, so it begins elsewhere than on the CPU: it runs, no more."""


@pytest.mark.parametrize(("strategy", "method"), [run for run in two_ranks.RUNS if run[1] not in DRAWN_THERE])
def test_two_devices_learn_what_one_cpu_learns(strategy: str, method: str, two: Path, one: Any) -> None:
    dist_equal.assert_equal_runs(
        one(method), dist_equal.left(two, f"{strategy}-{method}"), share=1e-3, beyond=5e-6, moved=1e-3
    )


@pytest.mark.parametrize(("strategy", "method"), [run for run in two_ranks.RUNS if run[1].startswith("grpo")])
def test_they_are_resumed_to_the_bit(strategy: str, method: str, two: Path) -> None:
    whole, again = (dist_equal.left(two, f"{strategy}-{method}{more}") for more in ("", "-again"))
    assert_same(whole["weights"], again["weights"])


def test_a_spread_reward_model_scores_as_a_whole_one(two: Path) -> None:
    for rank in dist_equal.left(two, "scorer")["ranks"]:
        assert rank["scores"] == pytest.approx(rank["whole"], abs=1e-5)
        assert rank["bytes"] < rank["whole_bytes"]


def test_a_command_starts_the_second_rank_itself(root: Path, tmp_path: Path) -> None:
    """The whole run of a user under FSDP2 with shards on the host: samples and metrics of both, validation, export."""
    words = [*SMALL, "trainer.max_steps=2", "strategy=fsdp", "trainer.strategy.cpu_offload=true"]
    words += ["trainer.devices=2", f"run_dir={tmp_path / 'run'}"]
    with dist_equal.port_of_ours() as port:
        told = subprocess.run(
            [sys.executable, str(root / "train.py"), *words], capture_output=True, text=True, timeout=300,
            env={**os.environ, "MASTER_PORT": str(port)},
        )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    assert "2 x cuda" in told.stdout + told.stderr
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
    assert all(isinstance(each, torch.Tensor) for each in same_bits.newest(tmp_path / "run")["state_dict"].values())
