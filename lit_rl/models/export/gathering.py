"""One whole tensor out of a parameter, however a strategy has taken it apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lit_rl.errors import ConfigError
from lit_rl.models.policy.device import mesh_device


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the whole tensor, detached, on the device that computes with it; a collective where it is sharded.

    A tensor that is whole already comes without a copy, so that writing to it writes to the model.

    Args:
        tensor: A parameter or a buffer: plain, of FSDP2, or of DeepSpeed's ZeRO stage 3.
        dtype: Casts it if it is floating; before it is gathered, so a narrower one is gathered in fewer bytes.
    """
    if hasattr(tensor, "ds_id"):
        import deepspeed  # pyright: ignore[reportMissingImports]

        with deepspeed.zero.GatheredParameters([tensor]):
            return _cast(tensor.detach(), dtype).clone()  # taken apart again on the way out
    tensor = _cast(tensor.detach(), dtype)
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to(mesh_device(tensor)).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor; nothing is gathered."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of the tensor that this process holds: a shard, or all of it."""
    held = getattr(tensor, "ds_tensor", tensor).detach()
    return held.to_local() if isinstance(held, DTensor) else held


def take_apart(module: nn.Module) -> None:
    """Put FSDP2's shards in place of tensors that a forward pass or `unsharded` has left gathered. The next pass
    gathers."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def refuse_flat(module: nn.Module) -> None:
    """Raise ConfigError where classic FSDP has flattened many parameters into one, without their names."""
    wrapped = any(isinstance(part, FullyShardedDataParallel) for part in module.modules())
    if wrapped or any(getattr(p, "_fsdp_flattened", False) for p in module.parameters()):
        raise ConfigError(
            "The policy is wrapped in classic FSDP (FullyShardedDataParallel), whose weights cannot be gathered one "
            "by one. Use strategy=fsdp, which is FSDP2, or strategy=ddp."
        )
