"""`score_tokens` by what is asked of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.ops.logprobs import score_tokens


def gather_logprobs(logits: Tensor, ids: Tensor, **settings: Any) -> Tensor:
    """The log-probs alone."""
    logprobs, entropy = score_tokens(logits, ids, **settings)
    assert entropy is None
    return logprobs


def logprobs_and_entropy_with_gradient(logits: Tensor, ids: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Both, and both have a gradient."""
    logprobs, entropy = score_tokens(logits, ids, entropy=True, entropy_gradient=True, **settings)
    assert entropy is not None
    return logprobs, entropy
