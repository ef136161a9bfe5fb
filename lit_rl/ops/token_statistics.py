"""Statistics of tokens, for weights and metrics: of the logits at a position, and of repeated n-grams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rl.ops.logprobs import blocks
from lit_rl.ops.sampling_distribution import NO_TRUNCATION


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


_FACTOR = -7046029254386353131  # odd: 2 ** 64 / golden ratio, as int64


@torch.no_grad()
def repeated_share(
    ids: Int[Tensor, "b t"], mask: Bool[Tensor, "b t"], n: int = 4
) -> tuple[Float[Tensor, " b"], Bool[Tensor, " b"]]:
    """Return the share of n-grams of each row that stood in it before, in [0, 1): 1 - distinct / all (2502.03373, C.2).

    N-grams are told apart by 64-bit hashes: among 4096 of them two different ones look alike with a chance below 1e-12.

    Args:
        ids: Tokens.
        mask: Those that count; an n-gram counts where all of its tokens do.
        n: Tokens of one n-gram, at least 1.

    Returns:
        The shares, 0 of rows without an n-gram; and which rows have one.
    """
    if ids.shape[1] < n:
        return torch.zeros(len(ids), device=ids.device), torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    counts = mask.unfold(1, n, 1).all(-1)
    hashes = torch.zeros_like(ids[:, n - 1 :])
    for place in range(n):  # integers wrap around, so this is a polynomial modulo 2 ** 64
        hashes = (hashes + ids[:, place : place + hashes.shape[1]] + 1) * _FACTOR
        hashes = hashes ^ (hashes >> 29)
    # What does not count gets numbers that no other place has: it is never a repetition.
    own = torch.arange(hashes.shape[1], device=ids.device).expand_as(hashes)
    keys, order = torch.where(counts, hashes, own).sort(dim=1)
    same = (keys[:, 1:] == keys[:, :-1]) & counts.gather(1, order)[:, 1:] & counts.gather(1, order)[:, :-1]
    total = counts.sum(1)
    return same.sum(1) / total.clamp(min=1), total > 0
