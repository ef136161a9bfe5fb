"""Attention of rows that share their prompts' keys and values, which are neither repeated nor masked.

Prompts of p tokens, b rows of t tokens of their own, k key heads that serve r query heads each, d and e wide. The rows
of a prompt are neighbours. For the m rows of one prompt and one key head, with their queries ``Q`` and the scaling c:

    S = [ Q K_promptᵀ | Q K_ownᵀ ]       (m r t, d) @ (d, p), and (m, r t, d) @ (m, d, t), causal
    W = softmax(c S)                     over the p + t scores of a query, in float32 or better
    O = W_prompt V_prompt + W_own V_own

and with the gradient ``G`` of ``O``

    ∂V_prompt = W_promptᵀ G      ∂S = c W ∘ (G Vᵀ - rowsum(W ∘ G Vᵀ))      ∂K_prompt = ∂S_promptᵀ Q      ∂Q = ∂S K

Every query that looks at a prompt is a row of one matrix, whose product also sums the gradients over rows and heads.
That is the softmax of plain causal attention over the same keys, split where the keys lie. In half precision scores are
not rounded before the softmax (a score ``c S`` of 20 could be off by 0.06, and its weight by 6 %), and gradients of a
prompt are summed over blocks in float32.

It runs over blocks of queries: those of some rows in some columns. They see no own key of a later column, so where
texts are long most of what a causal mask would hide is not computed. ``W`` is kept for the backward pass where it is no
larger than keys and values would be if they were repeated over rows and heads, t <= d + e; else it is computed anew,
block by block, and memory grows with t alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

BLOCK = 2**19
"""Scores in a block, about: two blocks and their results stay in the caches of a processor."""

COLUMNS = 32
"""Columns of queries in a block, at least."""

WORTH = 2**15
"""Scores of one prompt's queries and one key head, at least, for which products of their own are worth their calls.

Below, attention over repeated keys was faster on two threads of a CPU, twice so at 500.
"""

ALIGNED = 32
"""Padding is cut off a prompt in steps of this many columns: each new width makes oneDNN build kernels."""


@dataclass(frozen=True)
class Sharers:
    """Neighbouring rows, and the prompt that all of them look at."""

    prompt: int
    first: int
    last: int
    """The row after the last."""
    padding: int = 0
    """Columns of the prompt's keys, the first ones, that no row sees. Fewer than all."""


def is_worth(rows: float, queries_per_key: float, t: int, p: int) -> bool:
    """Tell whether this attention is expected to be no slower than attention over repeated keys.

    Args:
        rows: Rows of a prompt, on average.
        queries_per_key: Query heads that a key head serves.
        t: A row's own tokens.
        p: Tokens of a prompt.
    """
    return rows * queries_per_key * t * (p + t) >= WORTH


def keeps_weights(t: int, d: int, e: int) -> bool:
    """Tell whether the weights of a pass over ``t`` own tokens are kept for its backward pass."""
    return t <= d + e


def folded_attention(
    query: Float[Tensor, "b h t d"],
    prompt_keys: Float[Tensor, "n k p d"],
    prompt_values: Float[Tensor, "n k p e"],
    keys: Float[Tensor, "b k t d"],
    values: Float[Tensor, "b k t e"],
    groups: Sequence[Sharers],
    *,
    seen: Bool[Tensor, "b t"] | None = None,
    scaling: float,
) -> Float[Tensor, "b h t e"]:
    """Attend from each row's tokens to its prompt, and to its own tokens up to each.

    Args:
        query: Query heads of one key head are neighbours.
        prompt_keys: Of each prompt once. Their gradient is the sum over the rows that share them.
        prompt_values: Likewise.
        keys: Of the rows' own tokens.
        values: Likewise.
        groups: Every row once, in order.
        seen: The own tokens that may be looked at. None: all.
        scaling: What scores are multiplied by.
    """
    assert query.shape[1] % keys.shape[1] == 0
    return _FoldedAttention.apply(query, prompt_keys, prompt_values, keys, values, tuple(groups), seen, scaling)


@dataclass(frozen=True)
class _Block:
    """Queries of some rows of one prompt, in columns `start` to `stop`, of the heads that one key head serves."""

    prompt: int
    head: int
    skipped: int
    """Columns of the prompt that are cut off."""
    hidden: int
    """Columns of the prompt behind them that nothing sees."""
    rows: slice
    start: int
    stop: int


@dataclass(frozen=True)
class _Inputs:
    query: Tensor
    """(b, t, k, r, d)"""
    prompt_keys: Tensor
    prompt_values: Tensor
    keys: Tensor
    values: Tensor
    seen: Tensor | None
    scaling: float

    def blocks(self, groups: Sequence[Sharers]) -> Iterator[_Block]:
        """Yield blocks from the first columns to the last, so that a sum over blocks begins where it is whole."""
        _, t, k, r, _ = self.query.shape
        p = self.prompt_keys.shape[2]
        for group in groups:
            skipped = group.padding // ALIGNED * ALIGNED
            queries = max(1, BLOCK // (r * (p - skipped + t)))
            width = min(t, max(COLUMNS, queries // (group.last - group.first)))
            step = max(1, queries // width)
            for first in range(group.first, group.last, step):
                rows = slice(first, min(first + step, group.last))
                for start in range(0, t, width):
                    for head in range(k):
                        stop = min(start + width, t)
                        yield _Block(group.prompt, head, skipped, group.padding - skipped, rows, start, stop)

    def queries(self, block: _Block) -> Tensor:
        """Return (m, w r, d)."""
        return _flat(self.query[block.rows, block.start : block.stop, block.head])

    def weights(self, block: _Block, queries: Tensor) -> Tensor:
        """Return (m, w r, p + s) in the type of the queries: of the prompt, and of own columns up to the block's
        last."""
        prompt = self.prompt_keys[block.prompt, block.head, block.skipped :]
        scores = _exact_products(queries, prompt, self.keys[block.rows, block.head, : block.stop])
        p, (m, _, width) = len(prompt), scores.shape
        by_column = scores.view(m, block.stop - block.start, -1, width)
        by_column[..., : block.hidden] = -torch.inf
        later = torch.ones(by_column.shape[1], by_column.shape[1], dtype=torch.bool, device=scores.device).triu(1)
        by_column[..., p + block.start :].masked_fill_(later[:, None], -torch.inf)
        if self.seen is not None:
            by_column[..., p:].masked_fill_(~self.seen[block.rows, None, None, : block.stop], -torch.inf)
        return scores.mul_(self.scaling).softmax(-1).to(queries.dtype)  # queries in half precision would be rounded


class _FoldedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, prompt_keys, prompt_values, keys, values, groups, seen, scaling = given
        whole, e = _by_key_head(query, keys.shape[1]), values.shape[-1]
        inputs = _Inputs(whole, prompt_keys, prompt_values, keys, values, seen, scaling)
        keeps = any(ctx.needs_input_grad) and keeps_weights(query.shape[2], query.shape[3], e)
        out, kept = query.new_empty(*whole.shape[:-1], e), []
        for block in inputs.blocks(groups):
            weights = inputs.weights(block, inputs.queries(block))
            of_prompt = prompt_values[block.prompt, block.head, block.skipped :]
            found = _weighted(weights, of_prompt, values[block.rows, block.head, : block.stop])
            place = out[block.rows, block.start : block.stop, block.head]
            place.copy_(found.view(place.shape))
            if keeps:
                kept.append(weights)
        ctx.save_for_backward(query, prompt_keys, prompt_values, keys, values, seen, *kept)
        ctx.groups, ctx.scaling = groups, scaling
        return out.flatten(2, 3).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, prompt_keys, prompt_values, keys, values, seen, *kept = ctx.saved_tensors
        whole = _by_key_head(query, keys.shape[1])
        inputs = _Inputs(whole, prompt_keys, prompt_values, keys, values, seen, ctx.scaling)
        grad = _by_key_head(grads[0], keys.shape[1])
        of_query = torch.empty_like(inputs.query, memory_format=torch.contiguous_format)
        wide = torch.promote_types(query.dtype, torch.float32)  # many rows add up in a prompt, block by block
        sums = [
            torch.zeros_like(part, dtype=kind, memory_format=torch.contiguous_format)
            for part, kind in ((prompt_keys, wide), (prompt_values, wide), (keys, None), (values, None))
        ]
        for number, block in enumerate(inputs.blocks(ctx.groups)):
            queries = inputs.queries(block)
            weights = kept[number] if kept else inputs.weights(block, queries)
            of_out = _flat(grad[block.rows, block.start : block.stop, block.head])
            shared, own = (block.prompt, block.head), (block.rows, block.head, slice(block.stop))
            past = slice(block.skipped, None)
            _add_transposed(weights, of_out, sums[1][shared][past], sums[3][own])
            of_weights = _products(of_out, prompt_values[shared][past], values[own])
            of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            _add_transposed(of_scores, queries, sums[0][shared][past], sums[2][own])
            place = of_query[block.rows, block.start : block.stop, block.head]
            place.copy_(_weighted(of_scores, prompt_keys[shared][past], keys[own]).view(place.shape))
        for part in (of_query, sums[0], sums[2]):
            part.mul_(ctx.scaling)
        found = (part.to(query.dtype) for part in sums)
        return of_query.flatten(2, 3).transpose(1, 2), *found, None, None, None


def _by_key_head(x: Tensor, k: int) -> Tensor:
    """Turn `(b, k r, t, w)` into `(b, t, k, r, w)`."""
    return x.transpose(1, 2).unflatten(2, (k, -1))


def _flat(x: Tensor) -> Tensor:
    """Turn `(m, w, r, d)` into `(m, w r, d)`, in memory in that order."""
    return x.contiguous().flatten(1, 2)


def _products(x: Tensor, prompt: Tensor, own: Tensor) -> Tensor:
    """Return `(m, q, p + s)`: x `(m, q, d)` times the prompt's `(p, d)`, beside x times each row's own `(m, s, d)`."""
    (m, q, _), p = x.shape, len(prompt)
    found = x.new_empty(m, q, p + own.shape[1])
    torch.mm(x.flatten(0, 1), prompt.mT, out=found.flatten(0, 1)[:, :p])
    torch.bmm(x, own.mT, out=found[..., p:])
    return found


def _exact_products(x: Tensor, prompt: Tensor, own: Tensor) -> Tensor:
    """Compute `_products` in float32 or better: for narrow numbers the rounded product, and the part lost by rounding.

    Beside a matrix that it is added to, a product is rounded once: behind the sum.
    """
    rounded = _products(x, prompt, own)
    wide = rounded.to(torch.promote_types(x.dtype, torch.float32))
    if wide is rounded:
        return wide
    left, p = rounded.neg_(), len(prompt)
    left.flatten(0, 1)[:, :p].addmm_(x.flatten(0, 1), prompt.mT)
    left[..., p:].baddbmm_(x, own.mT)
    return wide.add_(left)


def _weighted(weights: Tensor, prompt: Tensor, own: Tensor) -> Tensor:
    """Return `(m, q, d)`: weights `(m, q, p + s)` of the prompt's `(p, d)` and of each row's own `(m, s, d)`."""
    (m, q, _), p = weights.shape, len(prompt)
    return torch.mm(weights.flatten(0, 1)[:, :p], prompt).view(m, q, -1).baddbmm_(weights[..., p:], own)


def _add_transposed(weights: Tensor, x: Tensor, prompt: Tensor, own: Tensor) -> None:
    """Add what flows back through `_weighted`: `(p, d)` to the prompt's gradient, `(m, s, d)` to each row's own."""
    p = len(prompt)
    of_prompt = weights.flatten(0, 1)[:, :p].mT, x.flatten(0, 1)
    if prompt.dtype == x.dtype:
        prompt.addmm_(*of_prompt)
    else:
        prompt.add_(torch.mm(*of_prompt))
    own.baddbmm_(weights[..., p:].mT, x)
