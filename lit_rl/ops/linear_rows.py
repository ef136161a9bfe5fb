"""What is asked of whole rows of logits, a block of rows at a time; and sums of gradients over blocks of a product.

With hidden states ``h`` (n, d), a head's weight ``W`` (v, d) and bias ``c``, a block of rows has the logits
``z = h Wᵀ + c``. They are let go when they have been measured, and computed anew in the backward pass. That has

    ∂L/∂h = ∂L/∂z W      ∂L/∂W = Σ_blocks (∂L/∂z)ᵀ h      ∂L/∂c = Σ_blocks Σ_rows ∂L/∂z

and the sums over blocks are float32, whatever the weights are: rounded to 8 bits at every block, as sums in bfloat16
are, the gradient of a head would be the worse the more blocks there are.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from lit_rl.ops.gradient_total import GradientTotal, SummedWeight, type_of_gradient

Measure = Callable[[slice, Tensor], tuple[Tensor, ...]]
"""Measures of some rows, ``(rows,)`` each, from the rows' numbers and their logits ``(rows, v)``."""

_PRODUCTS = 2**13
"""Rows of a product that stands beside a wider sum until it is added."""


def of_whole_rows(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    bias: Float[Tensor, " v"] | None,
    measure: Measure,
    *,
    size: int,
    learned: int = 1,
    summed: SummedWeight | None = None,
) -> tuple[Float[Tensor, " n"], ...]:
    """Return the results of `measure` for the logits of all rows, of which no more than a block are in memory.

    Args:
        hidden: In the type that the head multiplies in.
        weight: Of the head, in the same.
        bias: Likewise.
        measure: Called twice for a block, where a gradient is asked for. It gets the logits without a graph behind
            them, and holds nothing else that has a gradient.
        size: Rows of a block.
        learned: Number of measures, the first ones, that have a gradient; the others are constants.
        summed: The sum that the gradient of the weight is added to; `weight` itself is then a constant. None: its own.
    """
    token, total = (summed.token, summed.total) if summed else (None, None)
    return _WholeRows.apply(hidden, weight, bias, token, total, measure, size, learned)


class _WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 (autograd takes no keywords)
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token: Tensor | None,
        total: GradientTotal | None,
        measure: Measure,
        size: int,
        learned: int,
    ) -> tuple[Tensor, ...]:
        parts = [measure(rows, _row_logits(hidden[rows], weight, bias)) for rows in slices(max(1, len(hidden)), size)]
        found = tuple(torch.cat(column) for column in zip(*parts))
        kind = hidden.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.total, ctx.measure, ctx.size, ctx.learned = total, measure, size, learned
        ctx.save_for_backward(hidden, weight, bias)
        ctx.mark_non_differentiable(*found[learned:])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias = ctx.saved_tensors
        (kind, dtype, enabled), learned = ctx.autocast, ctx.learned
        sums = GradientSums(hidden, weight, bias, ctx.needs_input_grad, ctx.total)
        for rows in slices(max(1, len(hidden)), ctx.size):
            with torch.enable_grad(), torch.autocast(kind, dtype, enabled):
                product = _row_logits(hidden[rows].detach(), weight.detach(), None if bias is None else bias.detach())
                found = ctx.measure(rows, product.requires_grad_())[:learned]
            of_product = torch.autograd.grad(found, product, [grad[rows] for grad in grads[:learned]])[0]
            sums.add(of_product, rows, slice(0, len(weight)))
            del product, found, of_product  # before the next one is made
        return sums.hidden, sums.weight, sums.bias, None, None, None, None, None


def _row_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden, weight, bias)


def slices(total: int, size: int) -> Iterator[slice]:
    """Return slices of `size` each, the last one perhaps beyond the total."""
    return (slice(start, start + size) for start in range(0, total, size))


def exact(tensor: Tensor) -> torch.dtype:
    """Return the type of sums: float32, or the tensor's own float64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class GradientSums:
    """The gradients of hidden states, weight and bias, each None where nothing needs it.

    That of the weight is None too where a `total` is given: it is added there.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: tuple[bool, ...],
        total: GradientTotal | None = None,
    ) -> None:
        self._inputs, kind = (hidden, weight, bias), exact(hidden)
        make = torch.empty_like if len(hidden) else torch.zeros_like
        self._hidden = make(hidden, dtype=kind) if needed[0] else None
        self.weight = make(weight, dtype=type_of_gradient(weight)) if needed[1] else None
        self._adds = total is not None and not total.is_empty
        self._of_weight = self.weight if total is None else total.room()
        if total is not None and not self._adds and not len(hidden):
            total.room().zero_()
        self._bias = torch.zeros_like(bias, dtype=kind) if bias is not None and needed[2] else None
        self._sum = torch.empty(0)  # of the columns at hand, where the gradient of the weight is narrower

    def add(self, grad: Tensor, rows: slice, columns: slice) -> None:
        """Add a block of the gradient of the product; all blocks of some columns come one after another."""
        hidden, weight, _ = self._inputs
        if self._hidden is not None:
            _add_product(self._hidden[rows], grad, weight[columns], first=columns.start == 0)
        if self._of_weight is not None:
            of_columns, kind = self._of_weight[columns], exact(hidden)
            if of_columns.dtype == kind:
                _add_product(of_columns, grad.T, hidden[rows], first=rows.start == 0 and not self._adds)
            else:
                self._sum = torch.empty_like(of_columns, dtype=kind) if rows.start == 0 else self._sum
                _add_product(self._sum, grad.T, hidden[rows], first=rows.start == 0)
                if rows.stop >= len(hidden):
                    (of_columns.add_ if self._adds else of_columns.copy_)(self._sum)
        if self._bias is not None:
            self._bias[columns] += grad.sum(0, dtype=self._bias.dtype)

    @property
    def hidden(self) -> Tensor | None:
        return None if self._hidden is None else self._hidden.to(self._inputs[0].dtype)

    @property
    def bias(self) -> Tensor | None:
        of = self._inputs[2]
        return None if self._bias is None or of is None else self._bias.to(type_of_gradient(of))


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """Add ``left right`` to what is there; the first product is written over it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if first else 1)
        return
    for some, of_left in zip(total.split(_PRODUCTS), left.split(_PRODUCTS)):
        (some.copy_ if first else some.add_)(of_left @ right)
