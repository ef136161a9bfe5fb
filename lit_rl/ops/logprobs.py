"""Log-probabilities of given tokens, and entropies, from logits.

The logits of a language model are its largest tensor, so both directions work block by block: half-precision logits
are upcast a block at a time, and the backward pass computes the softmax anew instead of keeping it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

CPU_BLOCK, GPU_BLOCK = 2**22, 2**26
"""Numbers in one float32 block: 16 MiB, three times as fast as 64 MiB on a CPU; 256 MiB, enough rows to fill a GPU."""


def gather_logprobs(
    logits: Float[Tensor, "b t v"], ids: Int[Tensor, "b t"], *, temperature: float = 1.0
) -> Float32[Tensor, "b t"]:
    """``log softmax(logits / temperature)`` at ``ids``, computed in float32.

    The value has the same bits with and without gradient, so the first ratio of a policy to itself is exactly 1.

    Args:
        logits: Of the positions that predict ``ids``: the caller has shifted them by one.
        ids: In ``[0, v)``, at padding too.
        temperature: Above 0. Greedy decoding (0) has no log-probabilities to score.
    """
    return _Scores.apply(logits, ids, temperature, False)[0]


def logprobs_and_entropy(
    logits: Float[Tensor, "b t v"], ids: Int[Tensor, "b t"], *, temperature: float = 1.0
) -> tuple[Float32[Tensor, "b t"], Float32[Tensor, "b t"]]:
    """:func:`gather_logprobs`, and the entropy in nats of ``softmax(logits / temperature)``, which has no gradient."""
    return _Scores.apply(logits, ids, temperature, True)


class _Scores(torch.autograd.Function):
    """Keeps the logits as they came, and nothing of their size beside them."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert temperature > 0, f"temperature={temperature} must be above 0"
        logprobs = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        for block in _blocks(logits):
            log_softmax = (logits[block].float() / temperature).log_softmax(-1)
            logprobs[block] = log_softmax.gather(-1, ids[block].unsqueeze(-1)).squeeze(-1)
            if entropy is not None:
                finite = log_softmax.clamp(min=torch.finfo(torch.float32).min)  # an excluded token: 0 * -inf is NaN
                entropy[block] = -(log_softmax.exp() * finite).sum(-1)
        ctx.save_for_backward(logits, ids)
        ctx.temperature = temperature
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        """``d logprob / d logits = (one_hot(id) - softmax) / temperature``."""
        logits, ids = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for block in _blocks(logits):
            scale = grads[0][block].unsqueeze(-1) / ctx.temperature
            softmax = (logits[block].float() / ctx.temperature).softmax(-1)
            grad_logits[block] = softmax.mul_(-scale).scatter_add_(-1, ids[block].unsqueeze(-1), scale)
        return grad_logits, None, None, None


def _blocks(logits: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of the first two dimensions: logits are often a view of a longer tensor, which flattening would copy."""
    b, t, v = logits.shape
    numbers = CPU_BLOCK if logits.device.type == "cpu" else GPU_BLOCK
    rows = max(1, numbers // max(1, t * v))
    columns = max(1, numbers // max(1, v))
    for row in range(0, b, rows):
        for column in range(0, t, columns):
            yield slice(row, row + rows), slice(column, column + columns)
