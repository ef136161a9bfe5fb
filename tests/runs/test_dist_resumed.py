"""Two processes that stop in the middle of a rollout and go on end with the bits of the whole run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dist_equal import assert_same_metrics, left
from dist_resumed import SHAPES, STEPS, STOP
from runs_helpers import assert_same

pytestmark = [pytest.mark.dist, pytest.mark.all]


def saved(folder: Path, step: int) -> dict:
    return torch.load(folder / f"step={step}.ckpt", weights_only=True)


@pytest.mark.parametrize("name", SHAPES)
def test_two_processes_go_on_from_the_middle_of_a_rollout(two_ranks: Path, name: str) -> None:
    """Every rank has its own buffer, its own half-used rollout and its own noise."""
    whole, again = (two_ranks / "resumed" / name / which for which in ("whole", "again"))
    first, second = saved(whole, STEPS), saved(again, STEPS)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "lit_rl"):
        assert_same(first[part], second[part], part)
    assert_same(first.get("reference"), second.get("reference"), "reference")
    assert_same_metrics(left(whole, "logged"), left(again, "logged"))
    assert not (again / f"step={STOP - 1}.ckpt").exists(), "it began anew"
    mine, others = (rank["module"]["rollout"]["completions"]["response_ids"] for rank in saved(whole, STOP)["lit_rl"])
    assert mine.shape != others.shape or not torch.equal(mine, others)
