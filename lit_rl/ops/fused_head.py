"""Log-probabilities of given tokens from hidden states: the head of a language model and the softmax behind it in one.

With hidden states ``h`` (n, d), the head's weight ``W`` (v, d) and bias ``c``, and temperature ``τ``:

    z = (h Wᵀ + c) / τ        lse_i = log Σ_j exp z_ij        logprob_i = z_i,id(i) - lse_i
    p = exp(z - lse)          H_i = -Σ_j p_ij log p_ij

    ∂L/∂z_ij = g_i (1[j = id(i)] - p_ij) - k_i p_ij (log p_ij + H_i)        for gradients g of logprob and k of H
    ∂L/∂h = ∂L/∂z W / τ       ∂L/∂W = (∂L/∂z)ᵀ h / τ

The logits ``z`` are never whole: both directions run over blocks of tokens and of the vocabulary. The forward pass
keeps two numbers a token, the sums of ``exp(z - m)`` and of ``exp(z - m)(z - m)`` under a running maximum ``m``
(1805.02867, section 3); the backward pass computes a block of logits anew, and its ``p`` from ``lse``. Up to `KEPT`
bytes of logits cost little memory, and are kept instead, in the type of the product: nothing is lost.

Under truncation (see ``lit_rl.ops.logprobs``) a set is cut out of a whole row, so blocks are of tokens alone; and so
they are where earlier tokens change the logits. Blocks of whole rows (`measure_rows`) measure anything that a
function makes of ``z = h Wᵀ + c``: the logits are let go when they have been measured, and computed anew in the
backward pass,

    ∂L/∂h = ∂L/∂z W      ∂L/∂W = Σ_blocks (∂L/∂z)ᵀ h      ∂L/∂c = Σ_blocks Σ_rows ∂L/∂z

Sums of gradients over blocks are float32, whatever the weights are: rounded to 8 bits at every block, as sums in
bfloat16 are, the gradient of a head would be the worse the more blocks there are.

The gradient of a weight that is used several times is summed in one place. Autograd makes a whole tensor of what each
use of a weight ``W`` (v, d) gives it, and adds these up. For the embedding of a language model that is its head too,
and two calls of the model, these are four tensors of ``v d`` numbers, of which lookups fill a few rows. Here is one
such tensor ``S``, to which each use adds what it has:

    a head      S += (∂L/∂z)ᵀ h                  its products, block by block
    a lookup    S[id] += ∂L/∂(W[id])             rows

Megatron-LM calls that gradient accumulation fusion. In the graph a token stands for the weight: an empty tensor that
each use takes as an input, and to which it gives no gradient. When the backward passes of all uses are through, the
token's own gives ``S`` to the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Variable
from torch.nn import functional as F

from lit_rl.ops import logprobs as of_logits
from lit_rl.ops.logprobs import TokenStats
from lit_rl.ops.sampling_distribution import NO_TRUNCATION, History, Truncation


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

    def buffer(self) -> Tensor:
        """Return the ``(v, d)`` sum; where nothing was added, numbers without meaning, to be written over."""
        if self._sum is None:
            self._sum = torch.empty_like(self.weight, dtype=self._dtype)
            # A backward pass that does not reach the weight takes no sum: the next one begins anew.
            Variable._execution_engine.queue_callback(self._forget)  # pyright: ignore[reportAttributeAccessIssue]
        return self._sum

    def add_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Add ``rows`` (n, d) to the rows at ``ids``, long (n,), which may repeat."""
        total = self.buffer().zero_() if self.is_empty else self.buffer()
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


Measure = Callable[[slice, Tensor], tuple[Tensor, ...]]
"""Measures of some rows, ``(rows,)`` or ``(rows, k)`` each, from the rows' numbers and their logits ``(rows, v)``."""

_PRODUCTS = 2**13
"""Rows of a product that stands beside a wider sum until it is added."""


def measure_rows(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    bias: Float[Tensor, " v"] | None,
    measure: Measure,
    *,
    size: int,
    learned: int = 1,
    summed: SummedWeight | None = None,
) -> tuple[Float[Tensor, "n ..."], ...]:
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


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
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
        self._inputs, kind = (hidden, weight, bias), accumulation_dtype(hidden)
        make = torch.empty_like if len(hidden) else torch.zeros_like
        self._hidden = make(hidden, dtype=kind) if needed[0] else None
        self.weight = make(weight, dtype=type_of_gradient(weight)) if needed[1] else None
        self._adds = total is not None and not total.is_empty
        self._of_weight = self.weight if total is None else total.buffer()
        if total is not None and not self._adds and not len(hidden):
            total.buffer().zero_()
        self._bias = torch.zeros_like(bias, dtype=kind) if bias is not None and needed[2] else None
        self._sum = torch.empty(0)  # of the columns at hand, where the gradient of the weight is narrower

    def add(self, grad: Tensor, rows: slice, columns: slice) -> None:
        """Add a block of the gradient of the product; all blocks of some columns come one after another."""
        hidden, weight, _ = self._inputs
        if self._hidden is not None:
            _add_product(self._hidden[rows], grad, weight[columns], first=columns.start == 0)
        if self._of_weight is not None:
            of_columns, kind = self._of_weight[columns], accumulation_dtype(hidden)
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


Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

COLUMNS = 2**13
"""Tokens of the vocabulary in a block, at most: enough rows of the head's weight to use a matrix product well."""

KEPT = 2**26
"""Bytes of logits that are kept for the backward pass rather than computed twice: 64 MiB."""

_PART = 2**18
"""Numbers of a block that a CPU works on at a time: 1 MiB in float32, which stays in its cache."""

_PIECE, _SHORTEST_PIECE = 256, 32
"""Logits of which the highest is found at once: a vector operation on a CPU, which `argmax` of a long row is not."""


@dataclass(frozen=True)
class Distribution:
    """The distribution ``softmax_S(logits / temperature)``, where S is kept by truncation, and the statistics wanted of
    it.

    Args:
        temperature: Above 0.
        truncation: What the tokens were drawn with.
        entropy: Whether to compute its entropy.
        entropy_gradient: Whether that has a gradient.
        stats: Whether to compute `TokenStats`, of ``softmax(logits / temperature)``: there is no truncation then.
    """

    temperature: float = 1.0
    truncation: Truncation = NO_TRUNCATION
    entropy: bool = False
    entropy_gradient: bool = False
    stats: bool = False

    def __post_init__(self) -> None:
        assert self.temperature > 0, f"temperature={self.temperature} must be above 0"
        assert not self.stats or self.truncation.off
        assert self.entropy or not self.entropy_gradient

    def score_tokens(self, logits: Tensor, ids: Tensor, history: History | None = None) -> tuple[Tensor, Tensor | None]:
        """Return log-probs of ids ``(b, t)`` and entropies, see `lit_rl.ops.logprobs.score_tokens`."""
        return of_logits.score_tokens(
            logits,
            ids,
            temperature=self.temperature,
            truncation=self.truncation,
            history=history,
            entropy=self.entropy,
            entropy_gradient=self.entropy_gradient,
        )

    def score_further(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return log-probs ``(b, t, k)`` of several ids at each position, with gradient, where nothing is truncated."""
        wide = logits.to(accumulation_dtype(logits)) / self.temperature
        return wide.gather(-1, ids) - wide.logsumexp(-1, keepdim=True)


@dataclass(frozen=True)
class LinearScores:
    """Scores of ``n`` tokens, in float32 (float64 where the hidden states are)."""

    logprobs: Float[Tensor, " n"]
    """Log-probs, with gradient."""
    entropy: Float[Tensor, " n"] | None = None
    """Entropy, in nats. None unless requested."""
    stats: TokenStats | None = None
    """Statistics of the logits, without gradient. None unless requested."""
    further: Float[Tensor, "n k"] | None = None
    """Log-probs of further tokens, with gradient. None unless requested."""


def linear_logprobs(  # noqa: PLR0913 (one keyword a part of the computation)
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    ids: Int[Tensor, " n"],
    distribution: Distribution = Distribution(),
    *,
    bias: Float[Tensor, " v"] | None = None,
    history: History | None = None,
    summed: SummedWeight | None = None,
    compiler: Compiler | None = None,
    further_ids: Int[Tensor, "n k"] | None = None,
) -> LinearScores:
    """``log softmax_S((hidden weightᵀ + bias) / temperature)`` at ``ids``, without the logits in memory.

    Half-precision hidden states are multiplied in half precision, as the head itself would, so the logits have the
    rounding that a generator's have; everything after the product is float32.

    Args:
        hidden: What the head reads at the positions that predict ``ids``.
        weight: Of the head.
        ids: In ``[0, v)``.
        bias: Of the head.
        history: Of the positions ``(n,)``: what earlier tokens do to the logits. None: nothing.
        distribution: Of what the log-probs are, and what else is asked about it.
        compiler: Returns a function of tensors as one that reads and writes a block of logits once, where there is
            neither truncation nor history. None: operators of torch, one after another.
        further_ids: Further tokens at each position, whose log-probs are asked for too: where there is neither
            truncation nor history, and no statistic but the entropy. None: none.
    """
    assert ids.shape == hidden.shape[:1]
    if distribution.truncation.off and history is None and further_ids is None:
        learned = torch.is_grad_enabled()
        token, total = (summed.token, summed.total) if summed else (None, None)
        logprobs, entropy, *stats = _LinearScores.apply(
            hidden, weight, bias, token, total, ids, distribution, learned, compiler
        )
        return LinearScores(logprobs, entropy, TokenStats(*stats) if stats else None)
    past = None if history is None else history.over(len(weight))
    return _by_rows(hidden, weight, bias, ids, distribution, past, summed, further_ids)


# ---------------------------------------------------------------- without truncation: blocks of tokens and vocabulary


class _LinearScores(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 (autograd takes no keywords)
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token: Tensor | None,
        total: GradientTotal | None,
        ids: Tensor,
        distribution: Distribution,
        learned: bool,
        compiler: Compiler | None,
    ) -> Any:
        sums, kept = _Sums(hidden, ids, distribution, compiler=compiler), []
        keeps = len(ids) * len(weight) * hidden.element_size() <= KEPT and learned
        for rows, columns in _blocks(hidden, weight):
            product = _weighted_product(hidden, weight, bias, rows, columns)
            sums.add(product, rows, columns, own=not keeps)
            if keeps:
                kept.append(product)
            del product  # before the next one is made
        lse = sums.lse()
        entropy = sums.entropy() if distribution.entropy else None
        stats = sums.stats(lse) if distribution.stats else ()
        ctx.distribution, ctx.kept, ctx.total, ctx.compiler = distribution, kept, total, compiler
        ctx.save_for_backward(hidden, weight, bias, ids, lse, entropy if distribution.entropy_gradient else None)
        constants = [] if entropy is None or distribution.entropy_gradient else [entropy]
        ctx.mark_non_differentiable(*constants, *stats)
        return sums.picked - lse, entropy, *stats

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, ids, lse, entropy = ctx.saved_tensors
        of_entropy = None if entropy is None else grads[1]
        slopes = _Slopes(ctx.distribution.temperature, ids, lse, entropy, grads[0], of_entropy, ctx.compiler)
        sums = GradientSums(hidden, weight, bias, ctx.needs_input_grad, ctx.total)
        kept, ctx.kept = ctx.kept[::-1], []  # the graph outlives this pass; a second one multiplies anew
        for rows, columns in _blocks(hidden, weight):
            product = kept.pop() if kept else _weighted_product(hidden, weight, bias, rows, columns)
            slopes.write_over(product, rows, columns)
            sums.add(product, rows, columns)
            del product  # before the next one is made
        return sums.hidden, sums.weight, sums.bias, None, None, None, None, None, None


def _blocks(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of tokens and of the vocabulary.

    A block of the vocabulary stays while the tokens pass by: its weight is read, and its gradient summed, once.
    """
    columns = min(COLUMNS, len(weight))
    rows = _rows(hidden.device, columns, NO_TRUNCATION)
    for of_vocabulary in slices(len(weight), columns):
        for of_tokens in slices(len(hidden), rows):
            yield of_tokens, of_vocabulary


def _rows(device: torch.device, columns: int, truncation: Truncation, history: History | None = None) -> int:
    return max(1, of_logits.block_numbers(device, truncation, history) // columns)


def _weighted_product(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: slice, columns: slice) -> Tensor:
    """Return ``(rows, columns)``: the output of the head for hidden states, in their type."""
    return F.linear(hidden[rows], weight[columns], None if bias is None else bias[columns])


def _parts(rows: slice, product: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield a block in parts that stay near a processor while one operation after another passes over them."""
    start = rows.start
    for part in product.split(max(1, part_numbers(product.device) // product.shape[1])):
        yield slice(start, start + len(part)), part
        start += len(part)


def _logits(product: Tensor, temperature: float, *, own: bool) -> Float[Tensor, "rows columns"]:
    """Return the product in float32, divided by the temperature. An `own` product is written over if it is float32
    already."""
    numbers = product.to(accumulation_dtype(product))
    if temperature == 1:
        return numbers
    return numbers.div_(temperature) if own or numbers is not product else numbers / temperature


def part_numbers(device: torch.device) -> int:
    """Return the largest number of elements of a block that are worked on at a time."""
    block = of_logits.block_numbers(device, NO_TRUNCATION)
    return min(_PART, block) if device.type == "cpu" else block


@dataclass(frozen=True)
class _Slopes:
    """The gradient of a block of logits, computed from the block."""

    temperature: float
    ids: Tensor
    lse: Tensor
    entropy: Tensor | None
    of_logprobs: Tensor
    of_entropy: Tensor | None
    compiler: Compiler | None

    def write_over(self, product: Tensor, rows: slice, columns: slice) -> None:
        """Put the gradient of a block of the product in the place of the block."""
        for some, numbers in _parts(rows, product):
            entropy = None if self.entropy is None else self.entropy[some]
            of_entropy = None if self.of_entropy is None else self.of_entropy[some]
            given = self.temperature, self.lse[some], entropy, self.of_logprobs[some], of_entropy
            if self.compiler is not None:
                self.compiler(_write_slopes)(numbers, self.ids[some] - columns.start, *given)
                continue
            grad = _slopes_but_at_ids(numbers, *given, own=True)
            _add_at_ids(grad, self.ids[some], columns, self.of_logprobs[some, None] / self.temperature)
            if grad.dtype != numbers.dtype:
                numbers.copy_(grad)


def _slopes_but_at_ids(
    product: Tensor,
    temperature: float,
    lse: Tensor,
    entropy: Tensor | None,
    of_logprobs: Tensor,
    of_entropy: Tensor | None,
    *,
    own: bool,
) -> Float[Tensor, "rows columns"]:
    """Return the gradient of a block, less the extra part of each token's own logit. See `_logits` for `own`."""
    logits = _logits(product, temperature, own=own)
    log_p = logits.sub_(lse[:, None]) if own else logits - lse[:, None]
    scale = of_logprobs[:, None] / temperature
    if entropy is None or of_entropy is None:
        return log_p.exp_().mul_(-scale)
    spread = (log_p + entropy[:, None]).mul_(of_entropy[:, None] / temperature).add_(scale)
    return log_p.exp_().mul_(spread.neg_())


def _write_slopes(
    product: Tensor,
    at: Tensor,
    temperature: float,
    lse: Tensor,
    entropy: Tensor | None,
    of_logprobs: Tensor,
    of_entropy: Tensor | None,
) -> None:
    """Put the gradient of a block in its place, as one function to compile: `at` is the column of each row's own id."""
    grad = _slopes_but_at_ids(product, temperature, lse, entropy, of_logprobs, of_entropy, own=False)
    here = torch.arange(product.shape[1], device=product.device) == at[:, None]
    product.copy_(grad + torch.where(here, of_logprobs[:, None] / temperature, 0))


def _add_at_ids(grad: Tensor, ids: Tensor, columns: slice, scale: Tensor) -> None:
    """Add ``scale`` where a token's own id stands in the block."""
    at = ids - columns.start
    here = (at >= 0) & (at < grad.shape[1])
    grad.scatter_add_(1, at.clamp(0, grad.shape[1] - 1)[:, None], scale * here[:, None])


class _Sums:
    """Sums over rows of logits, block by block."""

    def __init__(self, hidden: Tensor, ids: Tensor, distribution: Distribution, *, compiler: Compiler | None) -> None:
        self._ids, self._distribution, self._compiler = ids, distribution, compiler
        self.picked = torch.zeros(ids.shape, dtype=accumulation_dtype(hidden), device=hidden.device)
        self._top = torch.full_like(self.picked, -torch.inf)
        self._sum = torch.zeros_like(self.picked)  # of exp(z - top)
        self._spread = torch.zeros_like(self.picked) if distribution.entropy else None  # of exp(z - top) (z - top)
        self._squares = torch.zeros_like(self.picked) if distribution.stats else None  # of exp(z - top)²
        self._plain = torch.zeros_like(self.picked) if distribution.stats else None  # of z
        self._likeliest = torch.zeros_like(ids) if distribution.stats else None
        self._vocabulary = 0

    def add(self, product: Tensor, rows: slice, columns: slice, *, own: bool) -> None:
        """Add a block of the product; an `own` block may be written over."""
        temperature = self._distribution.temperature
        for some, numbers in _parts(rows, product):
            at = self._ids[some] - columns.start
            here = (at >= 0) & (at < numbers.shape[1])
            picked = _logits(numbers.gather(1, at.clamp(0, numbers.shape[1] - 1)[:, None]), temperature, own=True)
            self.picked[some] += torch.where(here, picked[:, 0], 0)
            before = self._top[some]
            spread, squares = (None if part is None else part[some] for part in (self._spread, self._squares))
            given = temperature, before, self._sum[some], spread, squares
            if self._compiler is not None:
                if self._plain is not None:
                    self._add_stats(_logits(numbers, temperature, own=False), some, columns, before)
                found = self._compiler(_with_block)(numbers, *given)
            else:
                logits = _logits(numbers, temperature, own=own)
                if self._plain is not None:
                    self._add_stats(logits, some, columns, before)
                found = _with_block(logits, 1.0, *given[1:], own=own or logits is not numbers)
            kept = self._top, self._sum, self._spread, self._squares
            for whole, part in zip(kept, found, strict=True):
                if whole is not None and part is not None:
                    whole[some] = part

    def _add_stats(self, logits: Tensor, rows: slice, columns: slice, before: Tensor) -> None:
        assert self._plain is not None and self._likeliest is not None
        self._plain[rows] += logits.sum(1)
        likeliest = _likeliest(logits)
        higher = logits.gather(1, likeliest[:, None])[:, 0] > before
        self._likeliest[rows] = torch.where(higher, likeliest + columns.start, self._likeliest[rows])
        self._vocabulary = max(self._vocabulary, columns.start + logits.shape[1])

    def lse(self) -> Tensor:
        return self._top + self._sum.log()

    def entropy(self) -> Tensor:
        assert self._spread is not None
        return self._sum.log() - self._spread / self._sum

    def stats(self, lse: Tensor) -> tuple[Tensor, ...]:
        """Return the fields of `TokenStats`."""
        assert self._squares is not None and self._plain is not None
        log_sum_sq = 2 * (self._top - lse) + self._squares.log()
        found = TokenStats(log_sum_sq, self._likeliest == self._ids, self._plain / self._vocabulary)
        return tuple(getattr(found, field.name) for field in fields(found))


def _with_block(
    product: Tensor,
    temperature: float,
    before: Tensor,
    total: Tensor,
    spread: Tensor | None,
    squares: Tensor | None,
    own: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the highest logit of each row so far and the sums under it, `(rows,)` each, a block of the product
    included.

    Args:
        product: `(rows, columns)`.
        temperature: Of the distribution.
        before: The highest logit before.
        total: The sum of `exp(z - top)` before.
        spread: That of `exp(z - top) (z - top)`; None if it is not asked for.
        squares: That of `exp(z - top)²`; None if it is not asked for.
        own: Whether the product may be written over.
    """
    logits = _logits(product, temperature, own=own)
    top = torch.maximum(before, logits.amax(1))
    shrink = (before - top).exp()
    below = logits.sub_(top[:, None]) if own else logits - top[:, None]
    if spread is not None:
        moved = torch.where(before == -torch.inf, 0, before - top) * total
        exps = below.exp()
        spread = shrink * (spread + moved) + below.mul_(exps).sum(1)
    else:
        exps = below.exp_()
    total = shrink * total + exps.sum(1)
    if squares is not None:
        squares = shrink**2 * squares + exps.square_().sum(1)
    return top, total, spread, squares


def _likeliest(logits: Float[Tensor, "n v"]) -> Int[Tensor, " n"]:
    """Return ``argmax(1)``, of several highest the first: the piece that has the highest, then the place in it."""
    size = math.gcd(logits.shape[1], _PIECE)
    if size < _SHORTEST_PIECE:
        return logits.argmax(1)
    pieces = logits.unflatten(1, (-1, size))
    best = pieces.amax(2).argmax(1)
    inside = pieces.gather(1, best[:, None, None].expand(-1, 1, size))[:, 0].argmax(1)
    return best * size + inside


# ---------------------------------------------------------------- with truncation, a history: blocks of whole rows


def _by_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    distribution: Distribution,
    history: History | None,
    summed: SummedWeight | None,
    further_ids: Tensor | None,
) -> LinearScores:
    assert further_ids is None or (distribution.truncation.off and history is None and not distribution.stats)

    def measured(rows: slice, logits: Tensor) -> tuple[Tensor, ...]:
        seen = None if history is None else history.at((None, rows))
        found = [part for part in distribution.score_tokens(logits[None], ids[rows][None], seen) if part is not None]
        if further_ids is not None:  # behind the log-probs: what has a gradient comes first
            found.insert(1, distribution.score_further(logits[None], further_ids[rows][None]))
        return tuple(part[0] for part in found)

    size = _rows(hidden.device, weight.shape[0], distribution.truncation, history)
    learned = 1 + (further_ids is not None) + distribution.entropy_gradient
    found = measure_rows(hidden, weight, bias, measured, size=size, learned=learned, summed=summed)
    logprobs, *others = (column.to(accumulation_dtype(hidden)) for column in found)
    further = None if further_ids is None else others.pop(0)
    return LinearScores(logprobs, others[0] if others else None, further=further)
