"""Our draws inside the step of transformers' continuous batching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_rl.generation.batches import DecodeBatch, Decoded
from lit_rl.generation.responses import Responses
from lit_rl.generation.transforms import TokenSampler
from lit_rl.rollout import Prompts, Sampling


class Draws:
    """The engine's logits processors: draws every token with our noise, and leaves the engine no other choice.

    The engine names the requests of a step just before it. Tokens and log-probs are kept here, and the engine's own
    answers are not read.
    """

    do_processing = True
    tensors_required = 0

    def __init__(self, batch: DecodeBatch, prompts: Prompts, sampling: Sampling, forks: bool) -> None:
        device = batch.keys.device
        self._sampler = TokenSampler.of(batch, prompts, sampling)
        self._responses = Responses(prompts, sampling, len(batch.keys), device)
        self._device, self._longest = device, sampling.max_new_tokens
        self._rows = _row_names(batch, forks)
        self._all = torch.arange(len(batch.keys), device=device)
        self._requests: list[str] = []
        self._running, self._steps = self._all, 0
        self._autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        self.end: Callable[[str], None] | None = None
        """Ends a request of the engine."""

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Accept any: requests have no settings of their own."""

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Do nothing: there are no arguments."""

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        """Record the requests whose logits the next call gets, in order. Called in the engine's thread."""
        requests = [request.state.request_id for request in requests_in_batch if request.has_new_token]
        if requests != self._requests:
            self._requests = requests
            self._running = torch.tensor([self._rows[name] for name in requests], device=self._device, dtype=torch.long)
        # Autocast is set per thread, and its cache of weights is shared with the training.
        kind = self._device.type
        torch.set_autocast_cache_enabled(False)
        torch.set_autocast_enabled(kind, self._autocast[0])
        torch.set_autocast_dtype(kind, self._autocast[1])
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        """Draw the next tokens. ``scores``: float32 ``(n, v)`` or more rows; those beyond the n requests belong to
        unread prompts."""
        forced = torch.full_like(scores, -torch.inf)
        if not self._requests:
            return forced
        rows = self._running
        drawn = self._sampler(scores[: len(rows)], self._responses.lengths[rows], rows)
        self._responses.add(rows, drawn)
        self._steps += 1
        if self._steps % self._responses.look_every == 0:
            look = self._responses.look(self._all)  # at rows that the engine has ended since the last look too
            for request in self._requests:
                row = self._rows[request]
                if not look.running[row] and look.lengths[row] < self._longest:  # longer ones the engine ends by itself
                    assert self.end is not None
                    self.end(request)
        forced[: len(rows)].scatter_(1, drawn.tokens[:, None], 0.0)
        return forced

    @property
    def complete(self) -> bool:
        """Tell whether every row ended or has its full length."""
        self._responses.look_for_stops(self._all)
        return self._responses.complete

    def decoded(self) -> Decoded:
        return self._responses.decoded()


def _row_names(batch: DecodeBatch, forks: bool) -> dict[str, int]:
    """Return the row of a decode batch by the engine's name for it."""
    if not forks:
        return {str(row): row for row in range(len(batch.keys))}
    names = ["", *(f"__child#{fork}" for fork in range(batch.repeats - 1))]
    return {f"{i}{name}": i * batch.repeats + k for i in range(len(batch.prompt_ids)) for k, name in enumerate(names)}
