"""The gradient of a weight that is used several times, summed in one place.

Autograd makes a whole tensor of what each use of a weight ``W`` (v, d) gives it, and adds these up. For the embedding
of a language model that is its head too, and two calls of the model, these are four tensors of ``v d`` numbers, of
which lookups fill a few rows. Here is one such tensor ``S``, to which each use adds what it has:

    a head      S += (∂L/∂z)ᵀ h                  its products, block by block (`lit_rl.ops.linear_rows`)
    a lookup    S[id] += ∂L/∂(W[id])             rows

Megatron-LM calls that gradient accumulation fusion. In the graph a token stands for the weight: an empty tensor that
each use takes as an input, and to which it gives no gradient. When the backward passes of all uses are through, the
token's own gives ``S`` to the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import functional as F


@dataclass(frozen=True)
class SummedWeight:
    """A weight whose uses add their gradients to one sum."""

    token: Tensor
    """``(0,)``: what stands for the weight in the graph."""
    total: GradientTotal
    """The sum of the gradients."""

    @classmethod
    def of(cls, weight: Tensor) -> SummedWeight:
        """Open the sum for one forward pass.

        Args:
            weight: ``(v, d)``, dense, a leaf that requires a gradient.
        """
        total = GradientTotal(weight)
        return cls(_Token.apply(weight, total), total)

    def lookup(self, ids: Tensor, padding: int | None = None) -> Tensor:
        """Return ``(..., d)``: the rows of the weight at `ids`, long ``(...)``. Those of the padding id get no
        gradient."""
        return _Lookup.apply(self.token, self.total, ids, padding)


class GradientTotal:
    """The sum of a weight's gradients, which exists while a backward pass runs."""

    def __init__(self, weight: Tensor) -> None:
        assert weight.is_leaf and weight.requires_grad and weight.dim() == 2
        self.weight = weight.detach()
        self._dtype = type_of_gradient(weight)
        self._sum: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """True where this backward pass has added nothing yet."""
        return self._sum is None

    def room(self) -> Tensor:
        """Return the ``(v, d)`` sum; where nothing was added, numbers without meaning, to be written over."""
        if self._sum is None:
            self._sum = torch.empty_like(self.weight, dtype=self._dtype)
            # A backward pass that does not reach the weight takes no sum: the next one begins anew.
            Variable._execution_engine.queue_callback(self._forget)  # pyright: ignore[reportAttributeAccessIssue]
        return self._sum

    def add_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Add ``rows`` (n, d) to the rows at ``ids``, long (n,), which may repeat."""
        total = self.room().zero_() if self.is_empty else self.room()
        total.add_(torch.sparse_coo_tensor(ids[None], rows.to(total.dtype), total.shape, check_invariants=False))

    def take(self) -> Tensor | None:
        """Return the sum, which is the caller's from now on; None if nothing was added."""
        taken, self._sum = self._sum, None
        return taken

    def _forget(self) -> None:
        self._sum = None


def type_of_gradient(weight: Tensor) -> torch.dtype:
    """Return float32 for a bfloat16 weight with a float32 master: sums over blocks are not rounded, nor converted
    later."""
    return (weight.grad_dtype if weight.is_leaf else None) or weight.dtype


class _Token(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: GradientTotal) -> Tensor:
        ctx.total = total
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.total.take(), None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, total: GradientTotal, ids: Tensor, padding: int | None) -> Tensor:
        ctx.total, ctx.padding = total, padding
        ctx.save_for_backward(ids)
        return F.embedding(ids, total.weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (ids,) = ctx.saved_tensors
        ids, rows = ids.flatten(), grads[0].reshape(-1, grads[0].shape[-1])
        if ctx.padding is not None:
            there = ids != ctx.padding
            ids, rows = ids[there], rows[there]
        ctx.total.add_rows(ids, rows)
        return None, None, None, None
