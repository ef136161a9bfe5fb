"""Policies over images in two real processes, whole and sharded: the weights and metrics of one process.

All of the policy is trained, what sees too, and in some micro-batches no row of a rank shows anything.
"""

from __future__ import annotations

from pathlib import Path

import dist_equal
import dist_vision
import pytest
from dist_equal import Ones, left

pytestmark = [pytest.mark.dist, pytest.mark.all]


CASES = [*(("", name) for name in dist_vision.SHAPES), *(("fsdp", name) for name in dist_vision.SHARDED)]


@pytest.mark.parametrize(("how", "name"), CASES, ids=lambda word: word or "whole")
def test_two_processes_learn_as_one(name: str, how: str, two: Path, one: Ones) -> None:
    found, alone = left(two / how, name), one(name)
    start = dist_vision.model_of(name, one.folder)
    dist_equal.assert_equal_runs(alone, found, share=1e-3, beyond=1e-6, moved=1e-3, start=start.name)
    begun = start.load().state_dict()
    eyes = [key for key in found["weights"] if "vision" in key or "visual" in key]
    eyes = [key for key in eyes if ".lora_B." in key or name not in ("lora", "eyes")]
    assert any(not found["weights"][key].equal(begun[key]) for key in eyes), "what sees was trained"
