"""The model side of a decode loop: the prompts once a group, then one token a row a step.

`DecodingSteps` decodes any model with a cache of keys and values. `GeometricMixture` is a policy mixed with its
reference token by token, which the same loop sees as one model with one cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lit_rl.core.errors import ConfigError, in_range
from lit_rl.core.vision_inputs import Later, Vision
from lit_rl.generation.generator import DecodeBatch
from lit_rl.models.forward_inputs import (
    cache_input,
    cache_name,
    forward_parameters,
    later_positions,
    masks_that_hide,
    prompt_positions,
)
from lit_rl.models.shared_attention import caching_layers
from lit_rl.models.trunk import base_of


class DecodingSteps:
    """Decode steps of a batch: prefills the prompts once a group, repeats their cache for its rows, and adds a token a
    step.

    It asks no more of a model than a cache of keys and values, so it decodes with any kind of attention. ``logits`` are
    float32 ``(b, v)``: of the next token of every row. The tokens of a row stand together at the end of its columns.

    Args:
        policy: The model.
        batch: The rows to begin with.
        max_new_tokens: Most tokens of a row beside its prompt, except for those of finished rows that are not dropped
            yet.
    """

    def __init__(self, policy: nn.Module, batch: DecodeBatch, max_new_tokens: int) -> None:
        from transformers import PreTrainedModel

        self._policy: Any = policy
        self._named = forward_parameters(policy)
        self._cache = empty_cache(policy)
        self._cache_name = "cache" if "cache" in self._named else "past_key_values"  # `empty_cache` refuses others
        self._max_new_tokens = max_new_tokens
        self._joined = False
        # True where a mask may hide a token: else none is passed, and the device is not queried.
        known = isinstance(base_of(policy), PreTrainedModel) and "position_ids" in self._named
        self._hides = batch.padded or bool(batch.vision) or not known
        mask = batch.prompt_mask
        self._last_position = mask.shape[1] + max_new_tokens - 1
        positions = prompt_positions(policy, batch.prompt_ids, mask, batch.vision)
        seen = Vision.of(batch.vision, 1) if batch.vision else None
        shown = {} if seen is None else seen.model_inputs(mask.shape[1], 0, mask.device)
        # The last column by its number: of a slice, whose rows lie apart, torch makes one product a row where the head
        # is frozen (LoRA), which in bfloat16 on a CPU takes up to hundreds of times as long.
        last = torch.arange(mask.shape[1] - 1, mask.shape[1], device=mask.device)
        named = {"logits_to_keep": last} if "logits_to_keep" in self._named else {}
        logits = self._run(batch.prompt_ids, positions, attention_mask=mask, **named, **shown)
        self.logits = logits.repeat_interleave(batch.repeats, 0)
        behind = _behind(positions)
        self._next_position = behind.repeat_interleave(batch.repeats, 0)
        # The difference of positions from the number of tokens before, for models that rotate those of an image.
        self._ahead = (behind - mask.sum(1, keepdim=True)).repeat_interleave(batch.repeats, 0)
        self._share_out(batch)

    def advance(self, tokens: Tensor) -> None:
        """Give every row its next token, long ``(b,)``."""
        self.logits = self._step(tokens[:, None])
        # Finished rows stay until they are dropped, and must not leave the model's context.
        self._next_position.add_(1).clamp_(max=self._last_position)

    def keep(self, kept: Tensor) -> None:
        """Keep the given rows only, long ``(b,)``, ascending, one or more."""
        self._next_position, self._ahead = self._next_position[kept], self._ahead[kept]
        self._keep_cache(kept)

    def split(self, rows: Tensor) -> Self:
        """Return the given rows by themselves, long ``(b,)``, ascending, one or more; all rows stay here too."""
        part = copy.copy(self)
        part._cache = copy.copy(self._cache)
        part._cache.layers = [copy.copy(layer) for layer in self._cache.layers]
        part.logits = self.logits[rows]
        part.keep(rows)
        return part

    def feed(
        self,
        chunks: Sequence[Sequence[int]],
        positions: Tensor,
        stale: Tensor,
        later: Sequence[tuple[Later, ...]] = (),
    ) -> None:
        """Give every row several tokens at once. Only where `joinable` is true.

        Args:
            chunks: The tokens of each row, 1 or more.
            positions: Long ``(b,)``: tokens of the text before the first of them.
            stale: Long ``(b,)``: how many of the newest tokens of each row are taken back first.
            later: The images in each chunk, at their columns in it. Empty: there are none.
        """
        self._joined = True
        self._shift(stale)
        # Padded on the right while they are read, so that no hole is in any text: some models count columns.
        ids = pad_sequence([torch.tensor(chunk, device=positions.device) for chunk in chunks], batch_first=True)
        lengths = torch.tensor([len(chunk) for chunk in chunks], device=positions.device)
        columns = torch.arange(ids.shape[1], device=positions.device)
        first = positions[:, None] + self._ahead
        places = first + columns.minimum(lengths[:, None] - 1)
        lasts, which = (lengths - 1).unique(return_inverse=True)
        self._next_position, seen = first + lengths[:, None], {}
        if any(later):
            places = later_positions(self._policy, places, ids, later)
            self._next_position = _behind(places)
            self._ahead = self._next_position - positions[:, None] - lengths[:, None]
            seen = Vision.blind(len(ids), later).model_inputs(0, ids.shape[1], ids.device)
        logits = self._read(ids, columns < lengths[:, None], places, lasts, **seen)
        self.logits = logits[torch.arange(len(ids), device=logits.device), which].float()
        self._shift(ids.shape[1] - lengths)

    def join(self, others: Self) -> None:
        """Append the rows of another object, of the same model, which is used up.

        Only where `joinable` is true.
        """
        self._joined = True
        self.logits = torch.cat([self.logits, others.logits])
        self._next_position = torch.cat([self._next_position, others._next_position])
        self._ahead = torch.cat([self._ahead, others._ahead])
        self._last_position = max(self._last_position, others._last_position)
        self._join_cache(others)

    @property
    def joinable(self) -> bool:
        """Tell whether the rows of another object can be joined, and rows be fed."""
        return keeps_all(self._policy, self._cache)

    @property
    def prompts(self) -> int:
        """The number of prompts that are held once for all of their rows."""
        return 0

    @property
    def full(self) -> bool:
        """Tell whether finished rows have to be dropped now: the columns before all others go with them."""
        return self._length > self._last_position

    # ------------------------------------------------------------------ the cache

    def _share_out(self, batch: DecodeBatch) -> None:
        """Turn the prompts' cache into one of the rows."""
        if batch.repeats > 1:
            self._cache.batch_repeat_interleave(batch.repeats)
        self._length = batch.prompt_mask.shape[1]
        self._mask = self._with_new_columns(batch.prompt_mask.repeat_interleave(batch.repeats, 0))

    def _with_new_columns(self, mask: Tensor) -> Tensor:
        # True for every token to come: what a finished row writes is attended by that row alone, and thrown away.
        return nn.functional.pad(mask, (0, self._max_new_tokens), value=True)

    def _step(self, ids: Tensor) -> Tensor:
        self._length += 1
        return self._run(ids, self._next_position, attention_mask=self._mask[:, : self._length])

    def _read(self, ids: Tensor, mask: Tensor, positions: Tensor, lasts: Tensor, **seen: Tensor) -> Tensor:
        """Return logits ``(b, n, v)`` at ``n`` columns of a chunk ``(b, c)`` with valid tokens where ``mask`` is
        set."""
        self._hides = True
        whole = torch.cat([self._mask[:, : self._length], mask], 1)
        logits = self._logits(ids, positions, lasts, attention_mask=whole, **seen)
        self._length, self._mask = whole.shape[1], self._with_new_columns(whole)
        return logits

    def _shift(self, columns: Tensor) -> None:
        """Drop as many of the last columns of each row, ``(b,)``, and move the others up to the end."""
        if bool(columns.any()):
            index = moved_up(self._length, columns)
            for layer in self._layers():
                layer.keys, layer.values = at_columns(layer.keys, index), at_columns(layer.values, index)
            there = torch.arange(self._length, device=columns.device) >= columns[:, None]
            self._mask = self._with_new_columns(self._mask[:, : self._length].gather(1, index) & there)
        self._drop_unused()

    def _layers(self) -> list[Any]:
        """Return the layers of the cache with any content: a config may count more than a model has."""
        return [layer for layer in self._cache.layers if layer.keys is not None]

    def _keep_cache(self, kept: Tensor) -> None:
        self._cache.batch_select_indices(kept)
        self._mask = self._mask[kept]
        if self._joined:
            self._drop_unused()

    def _drop_unused(self) -> None:
        """Drop the columns before the first token of any row."""
        unused = int(self._mask.any(0).int().argmax())
        if unused:
            for layer in self._layers():
                layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]
            self._length, self._mask = (
                self._length - unused,
                self._with_new_columns(self._mask[:, unused : self._length]),
            )

    def _join_cache(self, others: Self) -> None:
        self._hides = True
        length = max(self._length, others._length)
        masks = [part._mask[:, : part._length] for part in (self, others)]
        self._mask = self._with_new_columns(torch.cat([nn.functional.pad(m, (length - m.shape[1], 0)) for m in masks]))
        for mine, theirs in zip(self._layers(), others._layers(), strict=True):
            mine.keys, mine.values = joined(mine.keys, theirs.keys), joined(mine.values, theirs.values)
            theirs.keys = theirs.values = None  # used up: not all of it is held twice until the last layer
        self._length = length

    def _run(self, ids: Tensor, positions: Tensor, **inputs: Any) -> Tensor:
        return self._forward(ids, positions, **inputs)[:, -1].float()

    def _logits(self, ids: Tensor, positions: Tensor, columns: Tensor, **inputs: Any) -> Tensor:
        """Return the logits of these columns; only these are computed where the model supports it."""
        if "logits_to_keep" in self._named:
            return self._forward(ids, positions, logits_to_keep=columns, **inputs)
        return self._forward(ids, positions, **inputs)[:, columns]

    def _forward(self, ids: Tensor, positions: Tensor, **inputs: Any) -> Tensor:
        if "position_ids" in self._named:  # ALiBi models take none
            inputs["position_ids"] = positions
        inputs[self._cache_name] = self._cache
        if not self._hides:
            inputs["attention_mask"] = None
        with masks_that_hide(ids.device) if self._hides else nullcontext():
            return self._policy(input_ids=ids, use_cache=True, **inputs).logits


def _behind(positions: Tensor) -> Tensor:
    """Return long ``(b, 1)``: the position of the next token, behind positions ``(b, s)`` or ``(3, b, s)``."""
    last = positions[:, -1:] if positions.ndim == 2 else positions[..., -1].amax(0)[:, None]
    return last + 1


# ------------------------------------------------------------------ caches


def empty_cache(policy: nn.Module) -> Any:
    """Return a cache of the model's own layer kinds. Refuse one that cannot be repeated over a group."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

    model = base_of(policy)

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"generator=native cannot decode {type(model).__name__}: {why}. Use generator=hf with it.")

    if cache_name(policy) is None:
        raise refuse("its forward takes neither cache nor past_key_values, so it keeps no cache of keys and values")
    if getattr(getattr(policy, "active_peft_config", None), "is_prompt_learning", False):
        raise refuse("its PEFT adapter adds virtual tokens to every call")
    cache = DynamicCache(config=model.config)
    for layer in caching_layers(cache):
        if not isinstance(layer, DynamicLayer) or isinstance(layer, LinearAttentionCacheLayerMixin):
            raise refuse(f"its cache holds a {type(layer).__name__}, which cannot be repeated over a group")
    return cache


def keeps_all(policy: nn.Module, cache: Any) -> bool:
    """Tell whether it is a model of transformers, and every layer of its cache keeps all of a text."""
    from transformers import PreTrainedModel
    from transformers.cache_utils import DynamicLayer

    kinds = {type(layer) for layer in caching_layers(cache)}
    return isinstance(base_of(policy), PreTrainedModel) and kinds == {DynamicLayer}


def moved_up(length: int, columns: Tensor) -> Tensor:
    """Return long ``(b, length)``: the columns to read so that the last ``columns`` ``(b,)`` are gone, and the others
    end there.

    The first columns then hold padding.
    """
    return (torch.arange(length, device=columns.device) - columns[:, None]).clamp_(min=0)


def at_columns(states: Tensor, index: Tensor) -> Tensor:
    """Return keys or values `(b, k, t, d)`, read at columns `(b, t)`."""
    return states.gather(2, index[:, None, :, None].expand_as(states))


def joined(one: Tensor, other: Tensor) -> Tensor:
    """Return keys or values `(b, k, t, d)` of rows of both, the shorter ones padded on the left."""
    length = max(one.shape[2], other.shape[2])
    return torch.cat([nn.functional.pad(part, (0, 0, length - part.shape[2], 0)) for part in (one, other)])


# ------------------------------------------------------------------ two models as one


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
        """The policy without its adapters. `lit_rl.models` reads the positions of image tokens from
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
        own = _last_logits(self.policy, inputs, extra, cache)
        with self.scoring() as reference:
            if first:
                self._reference_cache = empty_cache(reference)
            theirs = _last_logits(reference, inputs, extra, self._reference_cache)
        if first:
            # A model looks its mask up by the first layer of a kind.
            if set(cache.is_sliding) != set(self._reference_cache.is_sliding):
                raise ConfigError(
                    "The policy and the reference have layers of different kinds (sliding and full attention), and "
                    "their caches cannot be kept together. Take a reference of the policy's own architecture, such as "
                    "reference=auto."
                )
            # The same objects: rows that are repeated or dropped in one are in both.
            cache.layers.extend(self._reference_cache.layers)
        if own.shape != theirs.shape:
            raise ConfigError(
                f"The policy's logits are over {own.shape[-1]} tokens and the reference's over {theirs.shape[-1]}: "
                "only models of one vocabulary can be mixed. Take another reference, such as reference=auto."
            )
        return SimpleNamespace(logits=(1 - self.coefficient) * own + self.coefficient * theirs)


def _last_logits(model: nn.Module, inputs: dict[str, Any], extra: dict[str, Any], cache: Any) -> Tensor:
    """Return float32 logits of the last positions, ``(b, 1, v)``."""
    parameters = forward_parameters(model)
    named = {name: value for name, value in extra.items() if name in parameters}
    return model(**inputs, **named, **cache_input(model, cache)).logits[:, -1:].float()
