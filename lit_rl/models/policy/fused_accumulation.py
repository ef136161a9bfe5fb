"""Embedding and head add their gradients to one sum, over all calls of the model in a micro-batch.

The arithmetic is that of `lit_rl.ops.gradient_total`. A pass opens the sums, the calls inside it use them: lookups by
a replaced `forward` of the embedding, the head by `summed_weight` where it is fused with the softmax. A head that is
the embedding shares its sum with it. What uses the weight in any other way gets a gradient from autograd, as always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_rl.models.policy.loading import Float32Head, RulingHead
from lit_rl.models.policy.options import ForwardOptions
from lit_rl.models.policy.trunk import base_of
from lit_rl.ops.gradient_total import SummedWeight

_OPEN: dict[int, SummedWeight] = {}
"""Sums of the passes that are running, by the weight's `id`."""


@contextmanager
def fused_accumulation(model: nn.Module, options: ForwardOptions) -> Iterator[None]:
    """Let calls of the model with a gradient add those of the embedding and of the head to one sum each, inside.

    On CPUs (other devices are not measured); not of weights that are sharded, frozen, or wrapped by an adapter.

    Args:
        model: A causal language model, perhaps under PEFT.
        options: Whether to do so at all.
    """
    base = base_of(model)
    embedding: Any = getattr(base, "get_input_embeddings", lambda: None)()
    head: Any = getattr(base, "get_output_embeddings", lambda: None)()
    with ExitStack() as opened:
        if options.fused_accumulation and torch.is_grad_enabled():
            for layer in (embedding, head):
                if _gets_a_gradient(layer) and id(layer.weight) not in _OPEN:
                    _OPEN[id(layer.weight)] = SummedWeight.of(layer.weight)
                    opened.callback(_OPEN.pop, id(layer.weight))
            if _looks_up_rows(embedding) and (summed := summed_weight(embedding.weight)):
                opened.enter_context(in_its_place(embedding, _lookup(embedding, summed)))
        yield


def summed_weight(weight: Tensor) -> SummedWeight | None:
    """Return the sum for this weight's gradient, where a pass has opened one."""
    return _OPEN.get(id(weight))


@contextmanager
def in_its_place(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the forward of this one module, inside the context; hooks on it still run."""
    before = vars(layer).get("forward")  # that of a library which wraps modules; else it is the class's
    layer.forward = forward
    try:
        yield
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before


def _gets_a_gradient(layer: Any) -> bool:
    if type(layer) not in (nn.Embedding, nn.Linear, Float32Head, RulingHead):
        return False
    weight = layer.weight
    whole = weight.is_leaf and weight.dim() == 2 and not isinstance(weight, DTensor)
    return whole and weight.requires_grad and weight.device.type == "cpu"


def _looks_up_rows(embedding: Any) -> bool:
    plain = type(embedding) is nn.Embedding and "forward" not in vars(embedding)
    return plain and embedding.max_norm is None and not (embedding.scale_grad_by_freq or embedding.sparse)


def _lookup(embedding: nn.Embedding, summed: SummedWeight) -> Callable[[Tensor], Tensor]:
    return lambda ids: summed.lookup(ids, embedding.padding_idx)
