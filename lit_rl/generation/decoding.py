"""The model side of a decode loop: the prompts once a group, then one token a row a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lit_rl.errors import ConfigError
from lit_rl.generation.batches import DecodeBatch


class DecodingSteps:
    """Prefills the prompts once a group, repeats their cache for its rows, and lets it grow by a token a step.

    It asks no more of a model than a cache of keys and values, so it decodes with any kind of attention. ``logits`` are
    float32 ``(b, v)``: of the next token of every row.
    """

    def __init__(self, policy: nn.Module, batch: DecodeBatch, max_new_tokens: int) -> None:
        self._forward: Callable[..., Any] = policy
        self._named = forward_parameters(policy)
        self._cache = empty_cache(policy, self._named)
        mask = batch.prompt_mask
        positions = (mask.cumsum(1) - 1).clamp_(min=0)
        named = {"logits_to_keep": 1} if "logits_to_keep" in self._named else {}
        logits = self._run(batch.prompt_ids, positions, attention_mask=mask, **named)
        self.logits = logits.repeat_interleave(batch.repeats, 0)
        self._next_position = (positions[:, -1:] + 1).repeat_interleave(batch.repeats, 0)
        self._share_out(mask, batch.repeats, max_new_tokens)

    def advance(self, tokens: Tensor) -> None:
        """Give every row its next token, long ``(b,)``."""
        self.logits = self._step(tokens[:, None])
        self._next_position = self._next_position + 1

    def keep(self, kept: Tensor) -> None:
        """Go on with the given rows only, long ``(b,)``, ascending."""
        self._cache.batch_select_indices(kept)
        self._next_position = self._next_position[kept]
        self._mask = self._mask[kept]

    def _share_out(self, prompt_mask: Tensor, repeats: int, max_new_tokens: int) -> None:
        """Make of the prompts' cache one of the rows."""
        if repeats > 1:
            self._cache.batch_repeat_interleave(repeats)
        self._length = prompt_mask.shape[1]
        # True for every token to come: what a finished row writes is attended by that row alone, and thrown away.
        mask = nn.functional.pad(prompt_mask, (0, max_new_tokens), value=True)
        self._mask = mask.repeat_interleave(repeats, 0)

    def _step(self, ids: Tensor) -> Tensor:
        self._length += 1
        return self._run(ids, self._next_position, attention_mask=self._mask[:, : self._length])

    def _run(self, ids: Tensor, positions: Tensor, **inputs: Any) -> Tensor:
        if "position_ids" in self._named:
            inputs["position_ids"] = positions
        return self._forward(input_ids=ids, past_key_values=self._cache, use_cache=True, **inputs).logits[:, -1].float()


def base_model(policy: nn.Module) -> nn.Module:
    """The model under a PEFT wrapper, or the policy itself."""
    model: Any = policy
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def forward_parameters(policy: nn.Module) -> frozenset[str]:
    """What the model's forward pass takes by name."""
    # Read from the model under a PEFT wrapper, which takes anything. ALiBi models take no position_ids.
    return frozenset(inspect.signature(base_model(policy).forward).parameters)


def empty_cache(policy: nn.Module, forward_parameters: frozenset[str]) -> Any:
    """A cache of the model's own layer kinds, refused where it cannot be repeated over a group."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

    model: Any = base_model(policy)

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"generator=native cannot decode {type(model).__name__}: {why}. Use generator=hf with it.")

    if "past_key_values" not in forward_parameters:
        raise refuse("its forward takes no past_key_values, so it keeps no cache of keys and values")
    if getattr(getattr(policy, "active_peft_config", None), "is_prompt_learning", False):
        raise refuse("its PEFT adapter adds virtual tokens to every call")
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or isinstance(layer, LinearAttentionCacheLayerMixin):
            raise refuse(f"its cache holds a {type(layer).__name__}, which cannot be repeated over a group")
    return cache
