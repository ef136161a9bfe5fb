"""Arithmetic between two modules that are laid out alike: whole, or sharded with FSDP2, or one of them on the CPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_rl.errors import ConfigError


def stored_parameters(module: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the parameters of these names, as the shards that they are stored in."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # after a forward pass the gathered ones stand there, and writing to them is lost
    found = dict(module.named_parameters())
    if any(hasattr(found[name], "ds_id") for name in names):
        raise ConfigError(
            "A reference that moves cannot follow parameters that DeepSpeed's ZeRO stage 3 has taken apart: take "
            "strategy=fsdp or strategy=deepspeed_2, or a reference that stays (reference=frozen_copy)."
        )
    return {name: found[name] for name in names}


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def values_for(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return their values where ours are: the same shard, or the whole (a collective) where ours is not sharded."""
    whole = isinstance(theirs, DTensor) and not isinstance(ours, DTensor)
    values = theirs.full_tensor() if whole else local(theirs)  # pyright: ignore[reportAttributeAccessIssue]
    return values.to(device=ours.device, dtype=wide(ours.dtype))


def laid_out(whole: Tensor, like: Tensor) -> Tensor:
    if isinstance(like, DTensor):
        # No broadcast: every rank has read the same checkpoint.
        shard = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        return shard.to(like.device)  # the host, where the strategy keeps shards there
    return whole.to(like.device, copy=True)
