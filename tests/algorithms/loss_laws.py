"""What holds of the loss of every method, whatever it is a loss of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from held_state import same, state_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_rl.core.rollout import Width, columns_of


class AddsInOneOrder(TorchDispatchMode):
    """No operation inside names a row twice that torch's threads would then write, or add to, as they arrive.

    That is ``index_put`` and ``put``, and so the gradient of ``x[index]`` and of ``take``: forward, backward,
    and in a backward of one's own. With two threads 300 backward passes of `x[index]`, 32 rows to 256, gave 98 to 141
    different gradients; those of `index_select`, `gather`, `embedding`, `repeat_interleave`, `scatter_add`, `index_add`
    and `x[mask]` gave one.
    """

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation._schema.name.removeprefix("aten::")
        if name in ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"):
            assert not repeats(args[1]), f"{name} to equal places: write x.index_select(dim, index) for x[index]"
        elif name in ("put", "put_"):
            assert not repeats([args[1]]), f"{name} to equal places: write gather or index_select for take"
        return operation(*args, **(kwargs or {}))


def repeats(indices: Sequence[Tensor | None]) -> bool:
    """Whether some place is named twice by indices of whole numbers."""
    given = [index for index in indices if index is not None]
    if any(index.dtype == torch.bool for index in given):
        return False
    places = torch.stack([index.flatten() for index in torch.broadcast_tensors(*given)], 1)
    return len(places.unique(dim=0)) < len(places)


def padding_is_not_read(loss: Callable[..., Any], rollout: Any, scores: Any, *others: Any) -> None:
    """Whatever stands outside the responses changes neither the loss, nor a gradient, nor a metric."""
    padding = ~rollout.completions.response_mask
    expected = learned(loss, rollout, scores, *others)
    for number in (1e4, float("nan")):

        def spoiled(item: Any, number: float = number) -> Any:
            changes = {
                name: value.masked_fill(padding, number)
                for name, width, value in columns_of(item)
                if width is Width.RESPONSE and value is not None and value.is_floating_point() and value.ndim == 2
            }
            return dataclasses.replace(item, **changes)

        other = dataclasses.replace(spoiled(rollout), completions=spoiled(rollout.completions))
        fields = {name: getattr(scores, name) for name in ("logprobs", "entropy", "values")}
        theirs = {name: value.masked_fill(padding, number) for name, value in fields.items() if value is not None}
        same(expected, learned(loss, other, dataclasses.replace(scores, **theirs), *others), f"padded with {number}")


def learned(loss: Callable[..., Any], rollout: Any, scores: Any, *others: Any) -> Any:
    """Loss, gradient by what the policy and the critic say of each token, and metrics."""
    fields = {name: getattr(scores, name) for name in ("logprobs", "entropy", "values")}
    leaves = {name: value.detach().requires_grad_() for name, value in fields.items() if value is not None}
    found, metrics = loss(rollout, dataclasses.replace(scores, **leaves), *others)
    gradients = torch.autograd.grad(found, list(leaves.values()), allow_unused=True)
    return state_of([found, list(gradients), metrics])
