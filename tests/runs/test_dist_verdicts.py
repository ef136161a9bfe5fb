"""Two processes do what one does where the reference was asked before the first step, and they share its files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from dist_verdicts import RUNS, run

from lit_rl.algorithms.rollouts.phase_costs import is_speed
from lit_rl.models import LanguageModel

pytestmark = [pytest.mark.dist, pytest.mark.all]


@pytest.fixture(scope="module")
def folders(two_ranks: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What one process left, and what two did."""
    folder = tmp_path_factory.mktemp("one")
    for name in RUNS:
        run(name, folder, 1)
    return [folder, two_ranks / "verdicts"]


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_do_what_one_does(folders: list[Path], name: str) -> None:
    one, two = (torch.load(folder / f"{name}.pt", weights_only=True) for folder in folders)
    initial = LanguageModel("tiny").load().state_dict()
    for key, weight in one["weights"].items():
        difference, moved = (weight - two["weights"][key]).norm(), (weight - initial[key]).norm()
        assert moved > 0 and difference <= 1e-4 * moved + 1e-6, key
    for key, value in one["metrics"].items():
        if not is_speed(key):
            assert math.isclose(value, two["metrics"][key], rel_tol=1e-3, abs_tol=1e-5), key


def test_one_file_for_each_set_whatever_the_number_of_processes(folders: list[Path]) -> None:
    """The rows of training and validation; for KTO the pairs of two epochs, and those of validation."""
    one, two = (sorted(path.name for path in (folder / "cache").iterdir()) for folder in folders)
    assert len(one) == 5 and one == two
