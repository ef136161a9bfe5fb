"""`bf16-true` over two real processes: gradients are summed in float32 over micro-batches and ranks."""

from __future__ import annotations

import math

import pytest
import torch
from dist_equal import left
from torch import Tensor

from lit_rl.algorithms.optim.split_adamw import split
from lit_rl.models import LanguageModel

pytestmark = [pytest.mark.dist, pytest.mark.all]

ROUNDING = 2**-7
"""How far a gradient may be from another sum of the same rows, relative: each micro-batch's is rounded to 8 bits."""


def moved(run: dict[str, dict[str, Tensor]]) -> Tensor:
    initial = dict(LanguageModel("tiny", dtype="bfloat16").load().named_parameters())
    return torch.cat([(run["weights"][name].float() - p.detach().float()).flatten() for name, p in initial.items()])


@pytest.mark.parametrize("folder", [".", "fsdp"], ids=["ddp", "fsdp2"])
def test_two_processes_move_the_masters_as_one_does(folder, two, one):
    """Two ranks of two micro-batches have the same rows in a sum as one of four."""
    ours, theirs = left(two / folder, "sft"), one("sft", 4)
    assert ours["alike"], "the ranks hold different weights"
    change = moved(theirs)
    far = moved(ours) - change
    if folder == "fsdp":  # its masters are the weights as stored, which here are not bfloat16's
        initial = dict(LanguageModel("tiny").load().named_parameters())
        began = torch.cat([(p.detach() - p.detach().bfloat16().float()).flatten() for p in initial.values()])
        far = far - began
    assert change.norm() > 0.1
    # These then round to other weights, so later gradients differ by more: by 3 to 4 percent, as the processor has
    # products of bfloat16 or not.
    rounding = (8 if folder == "fsdp" else 1) * ROUNDING
    assert far.norm() <= rounding * change.norm()
    assert ours["metrics"]["train/grad_norm"] == pytest.approx(theirs["metrics"]["train/grad_norm"], rel=rounding)


def test_fsdp2_holds_float32_shards_and_generates_with_them(two):
    run = left(two / "fsdp", "grpo")
    assert {weight.dtype for weight in run["working"].values()} == {torch.float32}
    assert run["alike"] and all(map(math.isfinite, run["metrics"].values()))
    assert run["metrics"]["train/reward_std"] > 0 and run["metrics"]["train/grad_norm"] > 0


def test_ddp_computes_with_bfloat16(two):
    run = left(two, "sft")
    assert {weight.dtype for weight in run["working"].values()} == {torch.bfloat16}
    for name, weight in run["working"].items():
        rounded, remainder = torch.zeros_like(weight), torch.zeros_like(weight, dtype=torch.int16)
        split(run["weights"][name], rounded, remainder)
        assert torch.equal(weight, rounded), name
        assert remainder.any(), name
