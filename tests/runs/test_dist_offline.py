"""Offline methods over two real processes, and over micro-batches: the gradients of one process and one batch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dist_offline
import pytest
import torch

from lit_rl.models.language_model import LanguageModel

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """What two processes left behind."""
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, dist_offline.__file__, str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = child.communicate(timeout=900)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, 9)
            child.wait()
    assert child.returncode == 0, output[-6000:]
    return folder


@pytest.fixture(scope="module")
def ones(tmp_path_factory) -> dict[Any, Any]:
    """What one process does, made when it is first asked for."""
    return {"folder": tmp_path_factory.mktemp("one")}


def one(ones: dict[Any, Any], name: str, accumulate: int = 1) -> Any:
    if (name, accumulate) not in ones:
        folder = ones["folder"] / str(accumulate)
        folder.mkdir(exist_ok=True)
        dist_offline.run(name, folder, 1, accumulate)
        ones[name, accumulate] = torch.load(folder / f"{name}.pt", weights_only=True)
    return ones[name, accumulate]


def assert_equal_runs(first: Any, second: Any) -> None:
    assert first["weights"].keys() == second["weights"].keys()
    start, moved = LanguageModel("tiny").load().state_dict(), 0.0
    for name, weight in first["weights"].items():
        change = (weight - start[name]).norm().item() if name in start else weight.norm().item()
        moved = max(moved, change)
        assert (weight - second["weights"][name]).norm().item() <= 2e-4 * change + 2e-6, name
    assert moved > 1e-4, "nothing was learned, so nothing was compared"
    assert first["metrics"].keys() == second["metrics"].keys()
    for name, value in first["metrics"].items():
        if "time/" in name or name == "tokens_per_second" or name in first.get("cut", ()):
            continue
        other = second["metrics"][name]
        same = math.isclose(value, other, rel_tol=1e-3, abs_tol=1e-5) or (math.isnan(value) and math.isnan(other))
        assert same, (name, value, other)


@pytest.mark.parametrize("name", dist_offline.SHAPES)
def test_two_processes_equal_one(name, two, ones):
    assert_equal_runs(one(ones, name), torch.load(two / f"{name}.pt", weights_only=True))


@pytest.mark.parametrize("name", ["dpo", "aot"])
def test_sharded_processes_with_micro_batches_equal_one(name, two, ones):
    assert_equal_runs(one(ones, name), torch.load(two / "fsdp" / f"{name}.pt", weights_only=True))


@pytest.mark.parametrize("name", dist_offline.SHAPES)
def test_micro_batches_equal_a_whole_batch(name, ones):
    assert_equal_runs(one(ones, name), one(ones, name, 4))
