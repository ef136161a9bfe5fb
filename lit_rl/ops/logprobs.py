"""Log-probabilities of given tokens, entropies, and further statistics of positions, from logits.

The logits of a language model are its largest tensor, so both directions work block by block: half-precision logits
are upcast a block at a time, and the backward pass computes the softmax anew instead of keeping it.

Under truncation (top-k, top-p, min-p) the distribution is the softmax over a set S: the tokens that truncation keeps of
these very logits, and the token that is scored. That token was kept when it was drawn; a later policy, or a reference,
may have moved it out, and would call it impossible. Gradients take S as given: it has none of its own.

Earlier tokens change the logits first (``lit_rl.ops.sampling_distribution``): all of the above is about the changed
ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from lit_rl.ops import sampling_distribution
from lit_rl.ops.sampling_distribution import NO_TRUNCATION, History, Truncation

CPU_BLOCK, GPU_BLOCK = 2**22, 2**26
"""Numbers in one float32 block: 16 MiB, three times as fast as 64 MiB on a CPU; 256 MiB, enough rows to fill a GPU."""

_TRUNCATED_SHARE = 4
"""A block is this much smaller under truncation, which needs a handful of tensors of its size: a sort, its order; and
so where earlier tokens have a say."""


def score_tokens(
    logits: Float[Tensor, "b t v"],
    ids: Int[Tensor, "b t"],
    *,
    temperature: float = 1.0,
    truncation: Truncation = NO_TRUNCATION,
    history: History | None = None,
    entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Float32[Tensor, "b t"], Float32[Tensor, "b t"] | None]:
    """``log softmax_S(logits / temperature)`` at ``ids``, computed in float32, and the entropy in nats of the same
    distribution, where it is asked for. S is the vocabulary, or see above.

    ``d logprob / d logits_j = (1[j = id] - p_j) / temperature`` and, where it has a gradient,
    ``d H / d logits_j = -p_j (log p_j + H) / temperature`` with ``p = softmax_S(logits / temperature)``, 0 outside S.
    The values have the same bits with and without gradients, so the first ratio of a policy to itself is exactly 1.

    Args:
        logits: Of the positions that predict ``ids``: the caller has shifted them by one.
        ids: In ``[0, v)``, at padding too.
        temperature: Above 0. Greedy decoding (0) has no log-probabilities to score.
        truncation: What the tokens were drawn with.
        history: Of the positions ``(b, t)``: what earlier tokens do to the logits. None: nothing.
        entropy: Whether to compute it.
        entropy_gradient: Whether it takes part in the backward pass. Only where it is computed.
    """
    past = None if history is None else history.over(logits.shape[-1])
    return _Scores.apply(logits, ids, _Terms(temperature, truncation, entropy, entropy_gradient, past))


def logprobs_and_entropy(
    logits: Float[Tensor, "b t v"],
    ids: Int[Tensor, "b t"],
    *,
    temperature: float = 1.0,
    truncation: Truncation = NO_TRUNCATION,
) -> tuple[Float32[Tensor, "b t"], Float32[Tensor, "b t"]]:
    """Return log-probs and entropy of `score_tokens`; the entropy has no gradient."""
    return _Scores.apply(logits, ids, _Terms(temperature, truncation, entropy=True))


@dataclass(frozen=True)
class _Terms:
    temperature: float
    truncation: Truncation
    entropy: bool = False
    entropy_gradient: bool = False
    history: History | None = None

    def __post_init__(self) -> None:
        assert self.temperature > 0, f"temperature={self.temperature} must be above 0"

    def scaled(self, logits: Tensor, ids: Tensor, block: tuple[slice, slice]) -> Tensor:
        """Return a block in float32, divided by the temperature; under truncation in the arithmetic of the engine."""
        numbers = logits[block].float()
        if self.history is not None:
            numbers = self.history.at(block)(numbers, ids[block])
        if self.truncation.off:
            return numbers / self.temperature
        return sampling_distribution.temperature(numbers, self.temperature)


class _Scores(torch.autograd.Function):
    """A function that keeps the logits as they are for its backward pass, and nothing of their size beside them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, terms: _Terms) -> tuple[Tensor, Tensor | None]:
        logprobs = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(logprobs) if terms.entropy else None
        cut = None if terms.truncation.off else _Cut.empty(logprobs)
        for block in blocks(logits, terms.truncation, terms.history):
            scaled = terms.scaled(logits, ids, block)
            if cut is not None:
                kept = terms.truncation(scaled)
                cut.write(block, kept)
                scaled = _with_drawn(kept, scaled, ids[block])
            log_softmax = scaled.log_softmax(-1)
            logprobs[block] = log_softmax.gather(-1, ids[block].unsqueeze(-1)).squeeze(-1)
            if entropy is not None:
                entropy[block] = -(log_softmax.exp() * finite_logprobs(log_softmax)).sum(-1)
        ctx.terms = terms
        ctx.save_for_backward(logits, ids, entropy if terms.entropy_gradient else None, *(cut or (None, None)))
        if entropy is not None and not terms.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        logits, ids, entropy, *cut = ctx.saved_tensors
        terms: _Terms = ctx.terms
        grad_logits = torch.empty_like(logits)
        for block in blocks(logits, terms.truncation, terms.history):
            scale = grads[0][block].unsqueeze(-1) / terms.temperature
            scaled = terms.scaled(logits, ids, block)
            if not terms.truncation.off:
                scaled = _with_drawn(_Cut(*cut).apply(block, scaled), scaled, ids[block])
            if entropy is None:
                grad = scaled.softmax(-1).mul_(-scale)
            else:
                log_softmax = scaled.log_softmax(-1)
                of_entropy = grads[1][block].unsqueeze(-1) / terms.temperature
                spread = finite_logprobs(log_softmax).add_(entropy[block].unsqueeze(-1)).mul_(of_entropy).add_(scale)
                grad = log_softmax.exp_().mul_(spread.neg_())
            grad = grad.scatter_add_(-1, ids[block].unsqueeze(-1), scale)
            if terms.history is not None:
                grad = terms.history.at(block).slope_into(grad, logits[block])
            grad_logits[block] = grad
        return grad_logits, None, None


class _Cut(NamedTuple):
    """The cut of truncation at each position: the lowest logit kept, and the first id that has it and is kept, ``(b,
    t)``.

    All that is kept is above the lowest, or equal to it with an id not below the first (see ``transforms``). So the
    backward pass has the set of the forward pass, without a second sort.
    """

    lowest: Tensor
    first: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> "_Cut":
        return cls(torch.empty_like(like), torch.empty_like(like, dtype=torch.long))

    def write(self, block: tuple[slice, slice], kept: Tensor) -> None:
        lowest = kept.masked_fill(kept == -torch.inf, torch.inf).amin(-1, keepdim=True)
        self.lowest[block] = lowest.squeeze(-1)
        self.first[block] = (kept == lowest).byte().argmax(-1)

    def apply(self, block: tuple[slice, slice], scaled: Tensor) -> Tensor:
        lowest, first = self.lowest[block].unsqueeze(-1), self.first[block].unsqueeze(-1)
        early = torch.arange(scaled.shape[-1], device=scaled.device) < first
        return sampling_distribution.ban(scaled, (scaled < lowest) | ((scaled == lowest) & early))


def _with_drawn(kept: Tensor, scaled: Tensor, ids: Tensor) -> Tensor:
    drawn = ids.unsqueeze(-1)
    return kept.scatter_(-1, drawn, scaled.gather(-1, drawn))


def finite_logprobs(log_softmax: Tensor) -> Tensor:
    """Bound log-probs below, so that an excluded token gives 0 times a number, not 0 * -inf, which is NaN.

    exp is 0 in float32 below -104.
    """
    return log_softmax.clamp(min=-1000.0)


def blocks(logits: Tensor, truncation: Truncation, history: History | None = None) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the first two dimensions: logits are often a view of a longer tensor, which flattening would
    copy."""
    b, t, v = logits.shape
    numbers = block_numbers(logits.device, truncation, history)
    rows = max(1, numbers // max(1, t * v))
    columns = max(1, numbers // max(1, v))
    for row in range(0, b, rows):
        for column in range(0, t, columns):
            yield slice(row, row + rows), slice(column, column + columns)


def block_numbers(device: torch.device, truncation: Truncation, history: History | None = None) -> int:
    """Return the largest number of float32 elements of a block."""
    numbers = CPU_BLOCK if device.type == "cpu" else GPU_BLOCK
    return numbers if truncation.off and history is None else numbers // _TRUNCATED_SHARE


@dataclass(frozen=True)
class TokenStats:
    """Statistics of each position, in any shape."""

    log_sum_sq: Float[Tensor, "*shape"]
    """``log sum_v p_v^2``, in [-log v, 0]: the log-prob that a sampled token has on average, by its probability. WPO
    (2406.11827) takes the log-prob of a token relative to it."""
    correct: Bool[Tensor, "*shape"]
    """The token is the likeliest one; of several likeliest, the first."""
    mean_logit: Float[Tensor, "*shape"]
    """Mean over the vocabulary, of the logits divided by the temperature."""


@torch.no_grad()
def token_stats(logits: Float[Tensor, "b t v"], ids: Int[Tensor, "b t"], *, temperature: float = 1.0) -> TokenStats:
    """Return statistics of positions under ``softmax(logits / temperature)``, in float32 block by block.

    Args:
        logits: Of the positions that predict ``ids``: the caller has shifted them by one.
        ids: In ``[0, v)``, at padding too.
        temperature: Above 0.
    """
    log_sum_sq = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    mean_logit, correct = torch.empty_like(log_sum_sq), torch.empty_like(ids, dtype=torch.bool)
    for block in blocks(logits, NO_TRUNCATION):
        numbers = logits[block].float() / temperature
        mean_logit[block] = numbers.mean(-1)
        correct[block] = numbers.argmax(-1) == ids[block]
        log_sum_sq[block] = (2 * numbers.log_softmax(-1)).logsumexp(-1)
    return TokenStats(log_sum_sq, correct, mean_logit)
