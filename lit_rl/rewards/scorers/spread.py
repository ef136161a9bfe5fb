"""Weights of a scoring model that are spread over ranks, each of which gathers them as often as the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lit_rl.errors import RewardError

_GAVE_UP = -1


class Lockstep:
    """The number of calls that all ranks make of a model that is sharded over them.

    Args:
        mesh: Of one dimension: the ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group, self._device = mesh.get_group(), mesh.device_type
        self.agreed = False
        """True if this rank has reported its number of calls in this round."""

    def most(self, mine: int) -> int:
        """Return the largest number of calls that any rank wants to make; ours wants `mine`. A collective, once a
        round.

        Raises:
            RewardError: another rank aborted its round.
        """
        self.agreed = True
        said = torch.tensor([mine, -mine], device=self._device)
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group=self._group)
        most, least = int(said[0]), -int(said[1])
        if least == _GAVE_UP and mine != _GAVE_UP:
            raise RewardError("A reward model could not score the completions of another rank, which says why.")
        return most

    def give_up(self) -> None:
        """Report to the others that this rank makes no more calls, unless it has reported a number already."""
        if not self.agreed:
            self.most(_GAVE_UP)


def in_step(score: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a scoring method so that a failure on one rank, before its calls of the model, ends the round on all."""

    @wraps(score)
    def scored(self: Any, *args: Any, **columns: Any) -> Any:
        if self.lockstep is None:
            return score(self, *args, **columns)
        self.lockstep.agreed = False
        try:
            return score(self, *args, **columns)
        except BaseException:
            self.lockstep.give_up()
            raise

    return scored


def on_all_ranks(mesh: DeviceMesh, flag: bool) -> bool:
    """Tell whether the flag is set on every rank. A collective."""
    said = torch.tensor(int(flag), device=mesh.device_type)
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=mesh.get_group())
    return bool(said)


def can_spread(model: Any) -> bool:
    """Tell whether its layers are known, and all of its weights are of one type, as FSDP2 requires."""
    from lit_rl.models.policy.sharding import decoder_layers
    from lit_rl.models.policy.vision_parts import sees

    types = {weight.dtype for weight in model.parameters()}
    return bool(decoder_layers(model)) and len(types) == 1 and not sees(model.config)


def spread(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model that is only read: each layer is gathered when it runs, and freed afterwards."""
    from lit_rl.models.policy.sharding import decoder_layers

    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def local_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights that this process holds between two calls."""
    parts = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters())
    return sum(part.nbytes for part in parts)


def give_back(model: nn.Module) -> None:
    """Free gathered weights: those of the outermost module would wait for a backward pass that never happens."""
    if isinstance(model, FSDPModule):
        model.reshard()
