"""NEFTune: noise on the embeddings of the texts that are learned (2310.05914)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lit_rl.examples import TokenBatch
from lit_rl.models.policy.trunk import base_of
from lit_rl.transfers import to_device


@contextmanager
def noisy_embeddings(model: nn.Module, tokens: TokenBatch, alpha: float, keys: Sequence[int]) -> Iterator[None]:
    """Add noise to the embeddings that a forward pass over `tokens` reads, inside; outside the model is unchanged.

    The noise is uniform on +-alpha / sqrt(L d), with L the tokens of the token's own text and d the width of the
    embedding (2310.05914, algorithm 1; TRL's L is the padded row). It depends on the row's key and the row alone, not
    on padding, the other rows, a global generator or the device.

    Args:
        model: A language model, PEFT-wrapped or not.
        tokens: `b` rows.
        alpha: Scale of the noise, above 0.
        keys: A seed for each row, in `[0, 2^63)`.
    """

    def add(module: nn.Module, args: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        if not module.training:  # a trial of the model, on tokens of its own
            return embedded
        noise = _noise(tokens, embedded.shape[-1], alpha, keys).to(embedded.dtype)
        return embedded + to_device(noise.reshape(embedded.shape), embedded.device)

    handle = base_of(model).get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _noise(tokens: TokenBatch, width: int, alpha: float, keys: Sequence[int]) -> Tensor:
    """Return float32 `(b, s, d)` on the CPU, whose generator is the same everywhere; 0 at padding."""
    host = tokens.on_host
    attended = host.attention_mask
    noise = torch.zeros((*attended.shape, width), device="cpu")
    for row, (key, length) in enumerate(zip(keys, attended.sum(1).tolist(), strict=True)):
        generator = torch.Generator().manual_seed(key)
        torch.rand((length, width), generator=generator, out=noise[row, :length]).mul_(2).sub_(1)
    return noise * (alpha / (_text_lengths(attended, host.segment) * width).sqrt()).unsqueeze(-1)


def _text_lengths(mask: Tensor, segment: Tensor | None) -> Tensor:
    """Return float32 `(b, s)`: tokens of the text that each token belongs to, at least 1."""
    attended = mask.long()
    segment = torch.zeros_like(attended) if segment is None else segment
    counts = torch.zeros_like(attended).scatter_add(1, segment, attended)
    return counts.gather(1, segment).clamp(min=1).float()
