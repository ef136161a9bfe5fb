"""What logits say beside the log-prob of the token: for weights and metrics, without gradient."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rl.ops.logprobs import blocks
from lit_rl.ops.transforms import NO_TRUNCATION


@dataclass(frozen=True)
class TokenStats:
    """Statistics of each position, in any shape."""

    log_sum_sq: Float[Tensor, "*shape"]
    """``log sum_v p_v^2``, in [-log v, 0]: the log-prob that a sampled token has on average, by its probability. WPO
    (2406.11827) takes the log-prob of a token relative to it."""
    correct: Bool[Tensor, "*shape"]
    """The token is the likeliest one; of several likeliest, the first."""
    mean_logit: Float[Tensor, "*shape"]
    """Mean over the vocabulary."""


@torch.no_grad()
def token_stats(logits: Float[Tensor, "b t v"], ids: Int[Tensor, "b t"]) -> TokenStats:
    """Return statistics of positions, computed in float32 block by block.

    Args:
        logits: Of the positions that predict ``ids``: the caller has shifted them by one.
        ids: In ``[0, v)``, at padding too.
    """
    log_sum_sq = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    mean_logit, correct = torch.empty_like(log_sum_sq), torch.empty_like(ids, dtype=torch.bool)
    for block in blocks(logits, NO_TRUNCATION):
        numbers = logits[block].float()
        mean_logit[block] = numbers.mean(-1)
        correct[block] = numbers.argmax(-1) == ids[block]
        log_sum_sq[block] = (2 * numbers.log_softmax(-1)).logsumexp(-1)
    return TokenStats(log_sum_sq, correct, mean_logit)
