"""What a strategy decides before there are processes."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch.distributed.fsdp import CPUOffloadPolicy

from lit_rl.algorithms.optim.strategies import FSDP2Strategy, offload_policy
from lit_rl.core.errors import ConfigError


def fsdp(device: str, **settings) -> FSDP2Strategy:
    strategy = FSDP2Strategy(**settings)
    strategy.parallel_devices, strategy.cluster_environment = [torch.device(device)], LightningEnvironment()
    return strategy


@pytest.mark.parametrize(
    "device, settings, backend, pinned",
    [
        ("cuda:0", {}, "nccl", None),
        ("cuda:0", {"cpu_offload": True}, "cpu:gloo,cuda:nccl", True),
        ("cuda:0", {"cpu_offload": True, "process_group_backend": "cpu:gloo,cuda:gloo"}, "cpu:gloo,cuda:gloo", True),
        ("cpu", {"cpu_offload": True}, "gloo", False),
    ],
)
def test_shards_on_the_host_have_a_backend_beside_that_of_the_gpu(device, settings, backend, pinned):
    strategy = fsdp(device, **settings)
    assert strategy._get_process_group_backend() == backend
    policy = offload_policy(strategy)
    assert (policy.pin_memory if isinstance(policy, CPUOffloadPolicy) else None) is pinned


def test_a_backend_that_sends_nothing_of_the_host_is_refused_with_it():
    with pytest.raises(ConfigError, match="process_group_backend=nccl .*cpu:gloo,cuda:nccl"):
        fsdp("cuda:0", cpu_offload=True, process_group_backend="nccl")._get_process_group_backend()
