"""Weights spread over ranks (FSDP2, DeepSpeed's ZeRO stage 3, tensor parallelism), and brought together again.

    device_of ...                 the device that a model computes on, which need not be where its shards lie
    is_partitioned ...            parameters that DeepSpeed has taken apart, and whole ones in their place after a run
    shard, unsharded ...          FSDP2: units of a model, held whole for a while, and as one whole state dict
    whole_tensor ...              one tensor at a time, however a strategy has spread it
    stored_parameters ...         arithmetic between two modules that are laid out alike
    parallelize_layers ...        tensor parallelism beside FSDP2

Tensor parallelism spreads the layers of a model over a group of ranks: heads of attention, and the width of the MLP.
The plan is transformers' own (`base_model_tp_plan` of a config): projections into heads and into the MLP are cut by
columns, those out of them by rows (1909.08053, section 3). Embedding, head and the norms of the residual stream stay
whole on every rank of a group, which so computes the same logits, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lit_rl.core import upstream
from lit_rl.core.errors import ConfigError
from lit_rl.models.vision_parts import find_vision_model, trained_by_images


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


def is_partitioned(tensor: Tensor) -> bool:
    """Tell whether a parameter is managed by stage 3; it may be whole for the moment."""
    return hasattr(tensor, "ds_id")


def has_partitions(module: nn.Module) -> bool:
    """Tell whether stage 3 manages a module's parameters."""
    return any(is_partitioned(parameter) for parameter in module.parameters())


def restore_whole_parameters(module: nn.Module) -> None:
    """Put whole, plain parameters in the place of partitions once their engine has ended. A collective."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    whole: dict[int, nn.Parameter] = {}
    for part in module.modules():
        found = dict(part._parameters)  # not by its own reader, which would gather for good
        for parameter in found.values():
            if parameter is not None and id(parameter) not in whole and is_partitioned(parameter):
                with deepspeed.zero.GatheredParameters([parameter]):
                    plain = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                whole[id(parameter)] = plain
        part._parameters = {
            name: None if parameter is None else whole.get(id(parameter), parameter)
            for name, parameter in found.items()
        }
        for name in ("pre_bwd_fn", "post_bwd_fn"):  # of the engine that has ended
            vars(part).pop(name, None)


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
        module: The module to shard.
        mesh: Over which ranks.
        precision: The types of what is gathered and of reduced gradients. None is that of the weights.
        offload: Place of the shards between passes. None is the mesh's device.

    Raises:
        ConfigError: the model does not say which of its modules are its layers.
    """
    layers = decoder_layers(module)
    if not layers:
        raise ConfigError(f"{type(module).__name__} names no decoder layers, so it cannot be sharded. Use DDP instead.")
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": precision or MixedPrecisionPolicy(),
        "offload_policy": offload or OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True, **settings)
    fully_shard(module, reshard_after_forward=False, **settings)
    if trained_by_images(module):
        # FSDP2 reduces the gradients of a layer when those of its inputs are there, and without them after all others.
        # So beside a frozen embedding, under adapters, a rank whose rows show no image would send in another order
        # than the rest, unless what enters the first layer has a gradient on every rank.
        embedding: Any = find_vision_model(module).get_input_embeddings()
        if not any(parameter.requires_grad for parameter in embedding.parameters()):
            embedding.register_forward_hook(lambda _, __, out: out + out.new_zeros((), requires_grad=True))
    return module


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """Return the modules that a Hugging Face model declares must stay whole, which are its decoder layers.

    Of a model over images only the text's are returned: a rank whose rows show no image does not run the others, and
    would leave the other ranks waiting for it.
    """
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    seeing = find_vision_model(module)
    home = module if seeing is None else seeing.get_decoder()
    return [part for part in home.modules() if type(part).__name__ in names]


def move_all_but_shards(model: nn.Module, device: torch.device) -> None:
    """Move a model as `model.to(device)` does, with the shards of FSDP2 left where they are."""
    for part in model.modules():
        if not any(isinstance(weight, DTensor) for weight in part.parameters(recurse=False)):
            part._apply(lambda tensor: tensor.to(device), recurse=False)
        for name, tensor in part.named_buffers(recurse=False):
            part._buffers[name] = tensor.to(device)
        upstream.tell_device(part, device)


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Hold every parameter whole on every rank: gathered once, not once a generated token.

    Does nothing for a module that is not sharded. A collective: every rank enters it.
    """
    units: list[Any] = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            is_layer = not any(isinstance(part, FSDPModule) for part in unit.modules() if part is not unit)
            unit.set_reshard_after_forward(is_layer, recurse=False)


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
        import deepspeed  # pyright: ignore[reportMissingImports]

        state: dict[str, Tensor] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            with deepspeed.zero.GatheredParameters([tensor]):
                if torch.distributed.get_rank() == 0:
                    state[name] = tensor.detach().cpu().clone()
        return state
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}


def whole_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the whole tensor, detached, on the device that computes with it; a collective where it is sharded.

    A tensor that is whole already comes without a copy, so that writing to it writes to the model.

    Args:
        tensor: A parameter or a buffer: plain, of FSDP2, or of DeepSpeed's ZeRO stage 3.
        dtype: Casts it if it is floating; before it is gathered, so a narrower one is gathered in fewer bytes.
    """
    if is_partitioned(tensor):
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
    return local_shard(getattr(tensor, "ds_tensor", tensor).detach())


def reshard(module: nn.Module) -> None:
    """Put FSDP2's shards in place of tensors that a forward pass or `unsharded` has left gathered. The next pass
    gathers."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def refuse_flat_parameters(module: nn.Module) -> None:
    """Raise ConfigError where classic FSDP has flattened many parameters into one, without their names."""
    wrapped = any(isinstance(part, FullyShardedDataParallel) for part in module.modules())
    if wrapped or any(getattr(p, "_fsdp_flattened", False) for p in module.parameters()):
        raise ConfigError(
            "The policy is wrapped in classic FSDP (FullyShardedDataParallel), whose weights cannot be gathered one "
            "by one. Use strategy=fsdp, which is FSDP2, or strategy=ddp."
        )


def stored_parameters(module: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the parameters of these names, as the shards that they are stored in."""
    reshard(module)  # after a forward pass the gathered ones stand there, and writing to them is lost
    found = dict(module.named_parameters())
    if any(is_partitioned(found[name]) for name in names):
        raise ConfigError(
            "A reference that moves cannot follow parameters that DeepSpeed's ZeRO stage 3 has taken apart: take "
            "strategy=fsdp or strategy=deepspeed_2, or a reference that stays (reference=frozen_copy)."
        )
    return {name: found[name] for name in names}


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def local_shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def values_for(target: Tensor, source: Tensor) -> Tensor:
    """Return the source as the target lies: the same shard, or the whole (a collective) where that is not sharded."""
    whole = isinstance(source, DTensor) and not isinstance(target, DTensor)
    values = source.full_tensor() if whole else local_shard(source)  # pyright: ignore[reportAttributeAccessIssue]
    return values.to(device=target.device, dtype=at_least_float32(target.dtype))


def laid_out_like(whole: Tensor, like: Tensor) -> Tensor:
    if isinstance(like, DTensor):
        # No broadcast: every rank has read the same checkpoint.
        shard = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        return shard.to(like.device)  # the host, where the strategy keeps shards there
    return whole.to(like.device, copy=True)


TENSOR_PARALLEL_TYPES = ("llama", "qwen2", "qwen3")
"""Model types that were compared with one process. Others with a plan have weights beside it that heads share."""
_CUT = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_WHOLE_WITH_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
_PARTIAL = "_lit_rl_partial_gradient"
_CUT_HERE = "_lit_rl_cut"
_KEY = "trainer.strategy.tp_size"


def check_sharding_plan(config: Any, tp_size: int) -> None:
    """Refuse a model that cannot be spread over `tp_size` ranks; nothing is loaded.

    Args:
        config: The model's, of transformers.
        tp_size: Ranks of a tensor-parallel group.

    Raises:
        ConfigError: it is of a type that was never compared, or its sizes do not divide.
    """
    text = config.get_text_config(decoder=True)
    if text is not config or text.model_type not in TENSOR_PARALLEL_TYPES:
        raise ConfigError(
            f"{_KEY}={tp_size} with a {config.model_type}: only text models of the types "
            f"{', '.join(TENSOR_PARALLEL_TYPES)} were "
            "compared with one process. Take strategy=fsdp."
        )
    plan = _plan_of_layers(text)
    if unknown := sorted(set(plan.values()) - {*_CUT, _WHOLE_WITH_PARTIAL_GRADIENT}):
        raise ConfigError(
            f"{_KEY}={tp_size}: the plan of a {text.model_type} cuts modules as {', '.join(unknown)}, and only "
            f"colwise, rowwise and {_WHOLE_WITH_PARTIAL_GRADIENT} are built. Take strategy=fsdp."
        )
    if getattr(text, "attention_dropout", 0.0):
        raise ConfigError(
            f"{_KEY}={tp_size} with attention_dropout={text.attention_dropout} of the model: the heads of two ranks "
            "would drop the same places. Set model.init_kwargs.attention_dropout=0, or take strategy=fsdp."
        )
    heads = text.num_attention_heads
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "intermediate_size": text.intermediate_size,
    }
    for name, size in sizes.items():
        if size % tp_size:
            fits = ", ".join(str(n) for n in range(1, tp_size) if not any(each % n for each in sizes.values()))
            raise ConfigError(
                f"{_KEY}={tp_size} does not divide {name}={size} of the model. Smaller ones that divide it: {fits}."
            )


def parallelize_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the layers of a model in place, before `shard` spreads the rest over the other dimension of the mesh.

    Args:
        model: A causal LM whose config passes `check_sharding_plan`, with the same whole weights on every rank.
        mesh: The tensor-parallel group, a mesh of one dimension.
    """
    base: Any = getattr(model, "base_model", model)
    for pattern, style in _plan_of_layers(base.config).items():
        name_of_one = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        for part in [part for name, part in base.named_modules() if name_of_one.fullmatch(name)]:
            if style in _CUT:
                parallelize_module(part, mesh, _CUT[style](), src_data_rank=None)
                setattr(part, _CUT_HERE, True)
            else:
                setattr(part, _PARTIAL, True)


def is_tensor_parallel(model: nn.Module) -> bool:
    """Tell whether its layers are cut over a tensor-parallel group, so that every forward pass is a collective."""
    return any(getattr(part, _CUT_HERE, False) for part in model.modules())


def clip_over_meshes(model: nn.Module, mesh: DeviceMesh, weights: Sequence[Tensor], limit: float) -> Tensor:
    """Apply `torch.nn.utils.clip_grad_norm_` to weights that lie on several meshes, when all micro-batches were added.

    A collective, once a step.

    Args:
        model: The model that `parallelize_layers` cut.
        mesh: The mesh of that call.
        weights: Weights that are trained.
        limit: The norm that gradients have at most; infinite for none.

    Returns:
        0-dim: the norm before.
    """
    # Weights that every rank applies to heads of its own have a part of their gradient on each.
    for part in model.modules():
        for weight in part.parameters(recurse=False) if getattr(part, _PARTIAL, False) else ():
            if weight.grad is not None:
                local = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
                torch.distributed.all_reduce(local, group=mesh.get_group())
    norm = norm_over_meshes([weight.grad for weight in weights if weight.grad is not None])
    for weight in weights:  # one by one: torch takes those of one mesh together
        nn.utils.clip_grads_with_norm_([weight], limit, norm)
    return norm


def norm_over_meshes(gradients: list[Tensor]) -> Tensor:
    """Return the 2-norm of gradients that lie on several meshes: weights that are cut on two dimensions, others on one.

    0 without any gradient, as of a rollout without a score.
    """
    if not gradients:
        return torch.zeros(())
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [nn.utils.get_total_norm(each) for each in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(whole))


def _plan_of_layers(config: Any) -> dict[str, str]:
    plan = getattr(config, "base_model_tp_plan", None) or {}
    return {pattern: style for pattern, style in plan.items() if pattern.startswith("layers.")}
