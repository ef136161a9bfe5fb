"""Two processes do what one does where the reference was asked before the first step, and they share its files."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from offline_verdict_ranks import RUNS

from lit_rl.models import LanguageModel

pytestmark = [pytest.mark.dist, pytest.mark.all]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What one process left, and what two did."""
    made = []
    for devices in (1, 2):
        folder = tmp_path_factory.mktemp(f"devices{devices}")
        command = [sys.executable, str(Path(__file__).with_name("offline_verdict_ranks.py")), str(folder), str(devices)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
        made.append(folder)
    return made


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_do_what_one_does(folders: list[Path], name: str) -> None:
    one, two = (torch.load(folder / f"{name}.pt", weights_only=True) for folder in folders)
    initial = LanguageModel("tiny").load().state_dict()
    for key, weight in one["weights"].items():
        difference, moved = (weight - two["weights"][key]).norm(), (weight - initial[key]).norm()
        assert moved > 0 and difference <= 1e-4 * moved + 1e-6, key
    for key, value in one["metrics"].items():
        if not key.removeprefix("train/").startswith(("time/", "tokens_per_second")):
            assert math.isclose(value, two["metrics"][key], rel_tol=1e-3, abs_tol=1e-5), key


def test_one_file_for_each_set_whatever_the_number_of_processes(folders: list[Path]) -> None:
    """The rows of training and validation; for KTO the pairs of two epochs, and those of validation."""
    one, two = (sorted(path.name for path in (folder / "cache").iterdir()) for folder in folders)
    assert len(one) == 5 and one == two
