"""Parameters that DeepSpeed's ZeRO stage 3 has taken apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def is_apart(tensor: Tensor) -> bool:
    """Tell whether a parameter is managed by stage 3; it may be whole for the moment."""
    return hasattr(tensor, "ds_id")


def has_partitions(module: nn.Module) -> bool:
    """Tell whether stage 3 manages a module's parameters."""
    return any(is_apart(parameter) for parameter in module.parameters())


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Gather whole tensors on the CPU: rank 0 gets them, the other ranks an empty dict. A collective."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([tensor]):
            if torch.distributed.get_rank() == 0:
                state[name] = tensor.detach().cpu().clone()
    return state


def give_back(module: nn.Module) -> None:
    """Put whole, plain parameters in the place of partitions once their engine has ended. A collective."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    whole: dict[int, nn.Parameter] = {}
    for part in module.modules():
        found = dict(part._parameters)  # not by its own reader, which would gather for good
        for parameter in found.values():
            if parameter is not None and id(parameter) not in whole and is_apart(parameter):
                with deepspeed.zero.GatheredParameters([parameter]):
                    plain = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                whole[id(parameter)] = plain
        part._parameters = {
            name: None if parameter is None else whole.get(id(parameter), parameter)
            for name, parameter in found.items()
        }
        for name in ("pre_bwd_fn", "post_bwd_fn"):  # of the engine that has ended
            vars(part).pop(name, None)
