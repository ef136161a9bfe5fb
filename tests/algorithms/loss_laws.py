"""What holds of the loss of every method, whatever it is a loss of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from held_state import same, state_of
from torch import Tensor

from lit_rl.rollout import Width, columns_of


def adds_in_one_order(loss: Tensor) -> None:
    """No index of the graph names a row twice whose gradient torch would then add from several threads at once.

    With two threads 300 backward passes of `x[index]`, 32 rows to 256, gave 98 to 141 different gradients; those of
    `index_select`, `gather`, `embedding`, `repeat_interleave`, `scatter_add`, `index_add` and `x[mask]` gave one.
    """
    racing = [node.name() for node in nodes_of(loss) if node.name() == "TakeBackward0" or repeats(node)]
    assert not racing, f"{racing}: write x.index_select(dim, index) for x[index]"


def nodes_of(loss: Tensor) -> Iterator[Any]:
    """Every node of the graph behind a tensor."""
    seen, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions]
        yield node


def repeats(node: Any) -> bool:
    """Whether a node indexes by whole numbers that name some row twice."""
    if node.name() != "IndexBackward0":
        return False
    indices = [index for index in node._saved_indices if index is not None]
    if any(index.dtype == torch.bool for index in indices):
        return False
    places = torch.stack([index.flatten() for index in torch.broadcast_tensors(*indices)], 1)
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
