"""Our own draws inside the step of transformers' continuous batching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_rl.generation.batches import DecodeBatch, Decoded
from lit_rl.generation.transforms import EndDetector, TokenSampler
from lit_rl.rollout import Prompts, Sampling


class Draws:
    """In the place of the engine's list of logits processors: draws every token with our noise, and leaves the engine
    no other choice.

    The engine says which requests a step is for just before it. Tokens and log-probs are kept here, and nothing of the
    engine's own answers is read.
    """

    do_processing = True
    tensors_required = 0

    def __init__(self, batch: DecodeBatch, prompts: Prompts, sampling: Sampling, forks: bool) -> None:
        device, shape = batch.keys.device, (len(batch.keys), sampling.max_new_tokens)
        self._sampler = TokenSampler.of(batch, prompts, sampling)
        self._ends = EndDetector(prompts, sampling, device)
        self._rows = _row_names(batch, forks)
        self._requests: list[str] = []
        self._autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        self._ids = torch.full(shape, -1, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(shape, device=device)
        self._kept_logmass = None if sampling.truncation.off else torch.zeros(shape, device=device)
        self._lengths = torch.zeros(shape[0], dtype=torch.long, device=device)
        self._ended = torch.zeros(shape[0], dtype=torch.bool, device=device)
        self.end: Callable[[str], None] | None = None
        """Tells the engine that a request has ended."""

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Requests have no settings of their own."""

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Nor are there arguments."""

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        """Take note of whose logits the next call gets, in order. Called in the engine's thread."""
        self._requests = [request.state.request_id for request in requests_in_batch if request.has_new_token]
        # Autocast is a matter of the thread, and its cache of weights, which training would find, is everyone's.
        kind = self._ids.device.type
        torch.set_autocast_cache_enabled(False)
        torch.set_autocast_enabled(kind, self._autocast[0])
        torch.set_autocast_dtype(kind, self._autocast[1])
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        """``scores``: float32 ``(n, v)`` or more rows; those beyond the n requests belong to unread prompts."""
        forced = torch.full_like(scores, -torch.inf)
        if not self._requests:
            return forced
        rows = torch.tensor([self._rows[name] for name in self._requests], device=scores.device)
        position = self._lengths[rows]
        drawn = self._sampler(scores[: len(rows)], position, rows)
        self._ids[rows, position] = drawn.tokens
        self._logprobs[rows, position] = drawn.logprobs
        if self._kept_logmass is not None:
            assert drawn.kept_logmass is not None
            self._kept_logmass[rows, position] = drawn.kept_logmass
        self._lengths[rows] = position + 1
        self._ended[rows] = ended = self._ends(
            self._tail(rows, position), position, torch.ones_like(rows, dtype=torch.bool)
        )
        full = position + 1 == self._ids.shape[1]  # those the engine ends by itself
        for request, is_over in zip(self._requests, (ended & ~full).tolist()):
            if is_over:
                assert self.end is not None
                self.end(request)
        forced[: len(rows)].scatter_(1, drawn.tokens[:, None], 0.0)
        return forced

    def _tail(self, rows: Tensor, position: Tensor) -> Tensor:
        """The newest tokens of each row, ``(n, w)``, -1 before the first."""
        columns = position[:, None] + torch.arange(1 - self._ends.window, 1, device=rows.device)
        return self._ids[rows[:, None], columns.clamp(min=0)].masked_fill(columns < 0, -1)

    @property
    def complete(self) -> bool:
        """Whether every row ended or is as long as it may be."""
        return bool((self._ended | (self._lengths == self._ids.shape[1])).all())

    def decoded(self) -> Decoded:
        length = int(self._lengths.max())
        return Decoded(
            ids=self._ids[:, :length],
            mask=torch.arange(length, device=self._ids.device) < self._lengths[:, None],
            logprobs=self._logprobs[:, :length],
            ended=self._ended,
            kept_logmass=None if self._kept_logmass is None else self._kept_logmass[:, :length],
        )


def _row_names(batch: DecodeBatch, forks: bool) -> dict[str, int]:
    """Row of a decode batch by the engine's name for it."""
    if not forks:
        return {str(row): row for row in range(len(batch.keys))}
    names = ["", *(f"__child#{fork}" for fork in range(batch.repeats - 1))]
    return {f"{i}{name}": i * batch.repeats + k for i in range(len(batch.prompt_ids)) for k, name in enumerate(names)}
