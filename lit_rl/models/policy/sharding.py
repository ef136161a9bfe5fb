"""Spread a model's parameters over ranks with FSDP2, and bring them together where whole ones are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lit_rl.errors import ConfigError
from lit_rl.models.policy.partitions import has_partitions, whole_state
from lit_rl.models.policy.vision_parts import seeing_model, trained_by_images


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy | None = None,
    offload: OffloadPolicy | None = None,
) -> nn.Module:
    """Shard ``module`` in place: each decoder layer is a unit, and the rest (embedding, norm, head, vision) is the
    last.

    Serves a policy, with adapters or without, and a frozen reference. To be called once, before the optimizer is made.

    Args:
        module: What is sharded.
        mesh: Over which ranks.
        precision: The types of what is gathered and of reduced gradients. None is that of the weights.
        offload: Where the shards are between passes. None is the mesh's device.

    Raises:
        ConfigError: the model does not say which of its modules are its layers.
    """
    layers = decoder_layers(module)
    if not layers:
        raise ConfigError(f"{type(module).__name__} names no decoder layers, so it cannot be sharded. Use DDP instead.")
    how: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": precision or MixedPrecisionPolicy(),
        "offload_policy": offload or OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True, **how)
    fully_shard(module, reshard_after_forward=False, **how)
    if trained_by_images(module):
        _let_gradients_reach_the_embedding(module)
    return module


def _let_gradients_reach_the_embedding(module: nn.Module) -> None:
    """Let what enters the first layer have a gradient on every rank, as it has where images enter it too.

    FSDP2 reduces the gradients of a layer when those of its inputs are there, and without them after all others. So
    beside a frozen embedding, under adapters, a rank whose rows show nothing would send in another order than the rest.
    """
    embedding: Any = seeing_model(module).get_input_embeddings()
    if not any(parameter.requires_grad for parameter in embedding.parameters()):
        embedding.register_forward_hook(lambda _, __, out: out + out.new_zeros((), requires_grad=True))


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """Return the modules that a Hugging Face model declares must stay whole, which are its decoder layers.

    Of a model over images those of its text: a rank whose rows show nothing does not run the others, and would leave
    the rest waiting for it.
    """
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    seeing = seeing_model(module)
    home = module if seeing is None else seeing.get_decoder()
    return [part for part in home.modules() if type(part).__name__ in names]


def move_all_but_shards(model: nn.Module, device: torch.device) -> None:
    """Move a model as `model.to(device)` does, with the shards of FSDP2 left where they are."""
    from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin

    for part in model.modules():
        if not any(isinstance(weight, DTensor) for weight in part.parameters(recurse=False)):
            part._apply(lambda tensor: tensor.to(device), recurse=False)
        for name, tensor in part.named_buffers(recurse=False):
            part._buffers[name] = tensor.to(device)
        if isinstance(part, _DeviceDtypeModuleMixin):
            part._device = device  # what `module.device` says


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Hold every parameter whole on every rank: gathered once, not once a generated token.

    Does nothing for a module that is not sharded. A collective: every rank enters it.
    """
    units = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(_is_layer(unit), recurse=False)


def _is_layer(unit: FSDPModule) -> bool:
    assert isinstance(unit, nn.Module)
    return not any(isinstance(part, FSDPModule) for part in unit.modules() if part is not unit)


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return whole tensors on the CPU, under the names of the module that was never sharded.

    A collective where the module is sharded: rank 0 gets the tensors, the other ranks an empty dict. Tensors of a
    module on the CPU are not copied.
    """
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        gathered = get_model_state_dict(module, options=options)
        return {name: tensor for name, tensor in gathered.items() if isinstance(tensor, Tensor)}
    if has_partitions(module):
        return whole_state(module)
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
