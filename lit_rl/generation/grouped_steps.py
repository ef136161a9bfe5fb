"""Decode steps over a grouped cache (``grouped_cache``), and the proof that a model may be decoded so.

A model is proven before its first batch, by a few tokens. It is decoded both ways with the same arithmetic, and its
logits have to agree; each of its attentions has to equal, in float64, the one over grouped keys. So what a model's
attention does beyond plain causal attention over its cache (windows shorter than the text, biases, sinks, tokens that
are masked, keys that are changed after they were cached) is found rather than looked up in a list of models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rl.generation.batches import DecodeBatch
from lit_rl.generation.decoding import DecodingSteps, empty_cache
from lit_rl.generation.grouped_cache import IMPLEMENTATION, GroupedCache, NotGrouped, ProvingCache
from lit_rl.models.policy.attention import attending_by, keeps_whole_texts, text_config
from lit_rl.models.policy.forward_names import forward_parameters
from lit_rl.models.policy.trial import Trial
from lit_rl.models.policy.trunk import base_of

_TRIAL = Trial("generator.grouped_cache", "Each sample has its prompt's keys and values for itself", most=0.01)
"""On deterministic kernels the logits of the two ways are equal."""


class GroupedSteps(DecodingSteps):
    """Decode steps with the keys and values of a prompt held once a group, for a policy that `proven` approves."""

    kind: type[GroupedCache] = GroupedCache
    whole = False
    """True where products read the whole buffer for the rows' own tokens, so that no shape depends on their number."""

    @property
    def joinable(self) -> bool:
        return True

    @property
    def full(self) -> bool:
        return self._cache.own_length >= self._max_new_tokens

    def _share_out(self, batch: DecodeBatch) -> None:
        length = batch.prompt_mask.shape[1]
        layers: list[Any] = self._cache.layers
        whole = all(layer.keys is not None and layer.keys.shape[2] == length for layer in layers)
        if not whole or not keeps_whole_texts(self._cache, length + self._max_new_tokens):
            raise NotGrouped("the layers of its cache do not hold the whole text")
        self._cache = self.kind(
            self._cache,
            batch.prompt_mask,
            batch.repeats,
            self._max_new_tokens,
            batch.numbers,
            padded=batch.padded,
            whole=self.whole,
        )

    def _step(self, ids: Tensor) -> Tensor:
        with attending_by(base_of(self._policy), IMPLEMENTATION):
            return self._run(ids, self._next_position, attention_mask=None, grouped_cache=self._cache)

    @property
    def prompts(self) -> int:
        return self._cache.prompts

    def _read(self, ids: Tensor, mask: Tensor, positions: Tensor, lasts: Tensor, **seen: Tensor) -> Tensor:
        with attending_by(base_of(self._policy), IMPLEMENTATION), self._cache.reading(mask):
            return self._logits(ids, positions, lasts, attention_mask=None, grouped_cache=self._cache, **seen)

    def _shift(self, columns: Tensor) -> None:
        self._cache.shift(columns)

    def _keep_cache(self, kept: Tensor) -> None:
        self._cache.batch_select_indices(kept)

    def _join_cache(self, others: DecodingSteps) -> None:
        self._cache.join(others._cache)


class _ProvingSteps(GroupedSteps):
    kind = ProvingCache


def fits(policy: nn.Module, length: int) -> bool:
    """Tell whether a policy may be able to: a model of transformers with its ``sdpa`` attention, whose cache keeps
    every token of texts of ``length``."""
    model = base_of(policy)
    if not isinstance(model, PreTrainedModel) or "position_ids" not in forward_parameters(policy):
        return False
    return text_config(model)._attn_implementation == "sdpa" and keeps_whole_texts(empty_cache(policy), length)


def proven(policy: nn.Module) -> bool:
    """Decode a few tokens of two prompts both ways, and compare. Call it in evaluation mode, without gradient."""
    return _TRIAL.passes(policy, lambda: both_ways(policy, partial(_ProvingSteps, policy)))


def both_ways(policy: nn.Module, quicker: Callable[[DecodeBatch, int], DecodingSteps]) -> tuple[Tensor, Tensor]:
    """Return the logits of a `probe` by quicker steps, and by the model's own; see `decoded_probe`."""
    batch = probe(policy)
    own = decoded_probe(DecodingSteps(policy, batch, 5))
    return decoded_probe(quicker(batch, 5)), own


def probe(policy: nn.Module) -> DecodeBatch:
    """Return a batch of two prompts of five and three tokens, two rows each."""
    device = next(policy.parameters()).device
    size = text_config(base_of(policy)).vocab_size
    ids = (torch.arange(10, device=device) * 7 + 1).view(2, 5) % size
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :2] = False
    rows = torch.arange(4)
    return DecodeBatch(ids, mask, 2, rows.to(device), rows, [0, 1])


def decoded_probe(steps: DecodingSteps) -> Tensor:
    """Return logits ``(4, 4, v)`` of a `probe` with five new tokens at most: of two steps with another token for every
    row, one with several tokens, and one more."""
    size, device = steps.logits.shape[-1], steps.logits.device
    chunks = [[3 % size], [5 % size, 4 % size], [6 % size], [2 % size, 7 % size]]
    positions = torch.tensor([7, 7, 5, 5], device=device)
    logits = []
    for step in range(4):
        if step == 2:
            steps.feed(chunks, positions, torch.zeros_like(positions))
        else:
            steps.advance((torch.arange(4, device=device) * 5 + step + 2) % size)
        logits.append(steps.logits)
    return torch.stack(logits)
