"""NEFTune: noise on the embeddings of the texts that are learned (2310.05914)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lit_rl.examples import TokenBatch
from lit_rl.models.policy.trunk import base_of


@contextmanager
def noisy_embeddings(model: nn.Module, tokens: TokenBatch, alpha: float, keys: Sequence[int]) -> Iterator[None]:
    """Inside, a forward pass over `tokens` reads embeddings with noise. Outside the model is as it was.

    The noise is uniform on +-alpha / sqrt(L d), with L the tokens of the token's own text and d the width of the
    embedding (2310.05914, algorithm 1; TRL's L is the padded row). It depends on the row's key and the row alone, not
    on padding, the other rows or a global generator.

    Args:
        model: A language model, PEFT-wrapped or not.
        tokens: `b` rows.
        alpha: Scale of the noise, above 0.
        keys: A seed for each row, in `[0, 2^63)`.
    """

    def add(module: nn.Module, args: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        if not module.training:  # a trial of the model, on tokens of its own
            return embedded
        noise = _noise(tokens, embedded.shape[-1], alpha, keys).to(embedded)
        return embedded + noise.reshape(embedded.shape)

    handle = base_of(model).get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _noise(tokens: TokenBatch, width: int, alpha: float, keys: Sequence[int]) -> Tensor:
    """Float32 `(b, s, d)`, 0 at padding."""
    attended, device = tokens.attention_mask, tokens.attention_mask.device
    noise = torch.zeros((*attended.shape, width), device=device)
    for row, (key, length) in enumerate(zip(keys, attended.sum(1).tolist(), strict=True)):
        generator = torch.Generator(device).manual_seed(key)
        noise[row, :length] = 2 * torch.rand((length, width), generator=generator, device=device) - 1
    return noise * (alpha / (_text_lengths(tokens) * width).sqrt()).unsqueeze(-1)


def _text_lengths(tokens: TokenBatch) -> Tensor:
    """Float32 `(b, s)`: tokens of the text that each token belongs to, at least 1."""
    attended = tokens.attention_mask.long()
    segment = torch.zeros_like(attended) if tokens.segment is None else tokens.segment
    counts = torch.zeros_like(attended).scatter_add(1, segment, attended)
    return counts.gather(1, segment).clamp(min=1).float()
