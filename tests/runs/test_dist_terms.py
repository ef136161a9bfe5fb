"""Terms that count over a whole optimizer step do so over two real processes: the same gradients as one of them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dist_terms
import pytest
import torch

from lit_rl.models.language_model import LanguageModel

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """What two processes left behind."""
    folder = tmp_path_factory.mktemp("two")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, dist_terms.__file__, str(folder)]
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
def ones(tmp_path_factory) -> dict[str, Any]:
    """What one process does, made when it is first asked for."""
    return {"folder": tmp_path_factory.mktemp("one")}


def one(ones: dict[str, Any], name: str) -> Any:
    if name not in ones:
        dist_terms.run(name, ones["folder"], 1)
        ones[name] = torch.load(ones["folder"] / f"{name}.pt", weights_only=True)
    return ones[name]


def assert_equal_runs(first: Any, second: Any) -> None:
    assert first["weights"].keys() == second["weights"].keys()
    start = {f"policy.{name}": weight for name, weight in LanguageModel("tiny").load().state_dict().items()}
    moved = 0.0
    for name, weight in first["weights"].items():
        change = (weight - start[name]).norm().item() if name in start else weight.norm().item()
        moved = max(moved, change)
        assert (weight - second["weights"][name]).norm().item() <= 1e-4 * change + 2e-7, name
    assert moved > 1e-3, "nothing was learned, so nothing was compared"
    assert first["metrics"].keys() == second["metrics"].keys()
    for name, value in first["metrics"].items():
        if "time/" in name or name == "tokens_per_second":
            continue
        other = second["metrics"][name]
        same = math.isclose(value, other, rel_tol=1e-3, abs_tol=1e-5) or (math.isnan(value) and math.isnan(other))
        assert same, (name, value, other)


@pytest.mark.parametrize("name", dist_terms.shapes())
def test_ddp_equals_one_process(name, two, ones):
    assert_equal_runs(one(ones, name), torch.load(two / f"{name}.pt", weights_only=True))


def test_fsdp_equals_one_process_with_an_actor_and_a_critic(two, ones):
    assert_equal_runs(one(ones, "ppo"), torch.load(two / "fsdp" / "ppo.pt", weights_only=True))


def test_the_ranks_had_responses_of_different_lengths(two):
    """Else nothing was padded before it was gathered."""
    first, second = torch.load(two / "whitened.pt", weights_only=True)["widths"]
    assert len(first) == dist_terms.STEPS and first != second


def test_what_is_counted_was_there_to_count(two):
    metrics = {name: torch.load(two / f"{name}.pt", weights_only=True)["metrics"] for name in dist_terms.shapes()}
    assert metrics["dynamic"]["train/groups/drawn"] > 0
    assert metrics["weights"]["train/sampling/truncated"] >= 0 and metrics["weights"]["train/sampling/ess"] < 1
    assert 0 < metrics["kl-cov"]["train/kl_cov/share"] < 0.5
    assert metrics["entropy"]["train/entropy_coef"] > 0
    assert any(name.startswith("train/first/") for name in metrics["ppo"])
