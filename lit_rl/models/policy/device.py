"""Where a model computes, which under FSDP2 need not be where its parameters wait."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def device_of(module: nn.Module) -> torch.device:
    """Return the device for a module's inputs: that of its first parameter, or of the mesh where that is a shard.

    Shards may lie in the host's memory (`trainer.strategy.cpu_offload`), and are gathered on the device of the mesh.
    """
    first = next(module.parameters())
    return mesh_device(first) if isinstance(first, DTensor) else first.device


def mesh_device(shard: DTensor) -> torch.device:
    """Return the device of this process on which the shard is gathered."""
    kind = shard.device_mesh.device_type
    if shard.device.type == kind:
        return shard.device
    return torch.device(kind, torch.get_device_module(kind).current_device())
