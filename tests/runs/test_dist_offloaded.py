"""FSDP2 with weights, gradients and optimizer in the host's memory: the bits of FSDP2 without, over two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dist_equal import left
from dist_offloaded import CLIP, SHAPES, STEPS
from runs_helpers import assert_same

pytestmark = [pytest.mark.dist, pytest.mark.all]


def saved(folder: Path, name: str) -> dict:
    return torch.load(folder / f"{name}-step={STEPS}.ckpt", weights_only=True)


@pytest.mark.parametrize("name", SHAPES)
def test_shards_on_the_host_learn_and_go_on_as_those_on_the_device(two, name):
    device, host, again = (left(two / which, name) for which in ("device", "host", "again"))
    assert all(host["on_host"]) and not any(device["on_host"]) and len(host["on_host"]) > 2
    assert device["norm"] > CLIP, "nothing was clipped"
    for other in (host, again):
        assert_same(device["weights"], other["weights"], "weights")
        assert other["norm"] == device["norm"]
    first = saved(two / "device", name)
    for which in ("host", "again"):
        for part in ("state_dict", "optimizer_states"):
            assert_same(first[part], saved(two / which, name)[part], part)
