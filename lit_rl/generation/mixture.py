"""A policy mixed with its reference, token by token, for the native decode loop: one model with one cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from lit_rl.errors import ConfigError, in_range
from lit_rl.generation.decoding import empty_cache
from lit_rl.models.policy.forward_names import cache_input, forward_parameters
from lit_rl.models.policy.trunk import base_of


class GeometricMixture(nn.Module):
    """``softmax((1 - c) logits_policy + c logits_reference)``: proportional to ``policy^(1 - c) reference^c``.

    For `NativeGenerator` only: sync it in place of a policy. The decode loop applies temperature, truncation and noise
    to the mixed logits. The layers of the reference's cache are appended to the policy's, so that an operation on the
    rows of one applies to both.

    Args:
        policy: The policy; its parameters' device is that of the prompts.
        scoring: Opens the reference: yields a model of the reference's logits. Called at every token,
            since a reference may be the policy itself with its adapters switched off.
        coefficient: ``c``, in [0, 1]: 0 is the policy, 1 the reference.

    Raises:
        ConfigError: the coefficient is out of range, or one of the two cannot be decoded with a cache.
    """

    def __init__(
        self, policy: nn.Module, scoring: Callable[[], AbstractContextManager[Any]], coefficient: float
    ) -> None:
        super().__init__()
        in_range("algo.mixture_coef", coefficient, low=0, high=1)
        self.policy, self.scoring, self.coefficient = policy, scoring, float(coefficient)
        empty_cache(policy)  # refuses what the loop could not decode
        self._reference_cache: Any = None

    @property
    def config(self) -> Any:
        """The policy's config, with its context and the kinds of its cache's layers."""
        return self.policy.config

    @property
    def model(self) -> nn.Module:
        """The policy without its adapters. `models.policy.positions` reads the positions of image tokens from
        `.model`."""
        return base_of(self.policy)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        cache: Any,
        use_cache: bool = True,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **seen: Tensor,
    ) -> Any:
        """Return mixed float32 logits ``(b, q, v)`` as ``.logits``, and fill the cache of both models."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": use_cache, **seen}
        extra = {"position_ids": position_ids, "logits_to_keep": logits_to_keep}
        first = cache.get_seq_length() == 0
        own = _run(self.policy, inputs, extra, cache)
        with self.scoring() as reference:
            if first:
                self._reference_cache = empty_cache(reference)
            theirs = _run(reference, inputs, extra, self._reference_cache)
        if first:
            _join(cache, self._reference_cache)
        if own.shape != theirs.shape:
            raise ConfigError(
                f"The policy's logits are over {own.shape[-1]} tokens and the reference's over {theirs.shape[-1]}: "
                "only models of one vocabulary can be mixed. Take another reference, such as reference=auto."
            )
        return SimpleNamespace(logits=(1 - self.coefficient) * own + self.coefficient * theirs)


def _run(model: nn.Module, inputs: dict[str, Any], extra: dict[str, Any], cache: Any) -> Tensor:
    """Return float32 logits of the last positions, ``(b, 1, v)``."""
    parameters = forward_parameters(model)
    named = {name: value for name, value in extra.items() if name in parameters}
    return model(**inputs, **named, **cache_input(model, cache)).logits[:, -1:].float()


def _join(cache: Any, other: Any) -> None:
    """Append the other cache's layers, the same objects: rows that are repeated or dropped in one are in both."""
    if set(cache.is_sliding) != set(other.is_sliding):  # a model looks its mask up by the first layer of a kind
        raise ConfigError(
            "The policy and the reference have layers of different kinds (sliding and full attention), and their "
            "caches cannot be kept together. Take a reference of the policy's own architecture, such as reference=auto."
        )
    cache.layers.extend(other.layers)
