"""Attention over prompts that are held once (`lit_rl.ops.folded_attention`) in a model of transformers.

Its maths stand at the head of `lit_rl.ops.folded_attention`. A model reaches it by two registries of transformers,
under the name ``IMPLEMENTATION``: one of attention functions and one of masks. Both are strict. They stand in for
``sdpa`` only, whose meaning is known: anything that plain causal attention over prompt and own tokens would not do
raises `NotFolded`. So a window shorter than the text, a bias, a sink, or keys that are changed after they were cached
are found by a trial of each model (`ProvingFoldedCache`), rather than looked up in a list of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lit_rl.core.errors import ConfigError
from lit_rl.models.forward_inputs import cache_input
from lit_rl.models.trial import Unfit
from lit_rl.models.trunk import base_of
from lit_rl.ops.folded_attention import Sharers, folded_attention, is_worth

_CHANGING = {"dynamic", "longrope"}
"""Kinds of rotary embeddings whose angles depend on the length of the text."""


def text_config(model: Any) -> Any:
    """Return the part of a model's config that its text layers read."""
    return model.config.get_text_config(decoder=True)


def queries_per_key(config: Any) -> float:
    """Return the number of query heads that a key head serves, by the config of text layers."""
    keys = getattr(config, "num_key_value_heads", None)
    return config.num_attention_heads / keys if keys else 1.0


@contextmanager
def using_attention(model: Any, implementation: str) -> Iterator[None]:
    """Let the model's layers look up this attention and its masks in transformers' registries, inside the context."""
    config = text_config(model)
    usual = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = usual


def caching_layers(cache: Any) -> list[Any]:
    """Return the layers of a cache that keep keys and values of their own.

    Some layers read those of earlier ones (Gemma 3n, Gemma 4); transformers 5.24 counts them, older ones do not.
    """
    empty = getattr(cache, "is_dummy", None) or [False] * len(cache.layers)
    return [layer for layer, holds_nothing in zip(cache.layers, empty, strict=True) if not holds_nothing]


def keeps_whole_texts(cache: Any, length: int) -> bool:
    """Tell whether every layer keeps the keys of ``length`` tokens, and no window ends before the first of them."""
    return all(
        type(layer) is DynamicLayer or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= length)
        for layer in cache.layers
    )


def has_constant_rotation(model: nn.Module, length: int) -> bool:
    """Tell whether a token is rotated by the same angles in every text of at most ``length`` tokens.

    Dynamic NTK and LongRoPE look at the longest text of a call once it reaches a limit of the model.
    """
    part: Any
    for part in model.modules():
        if not hasattr(part, "rope_type"):
            continue
        kinds = part.rope_type.values() if isinstance(part.rope_type, dict) else [part.rope_type]  # one a kind of layer
        if not _CHANGING & set(kinds):
            continue
        settings = part.config.rope_parameters or {}
        every = [settings, *(each for each in settings.values() if isinstance(each, dict))]
        limits = [
            each["original_max_position_embeddings"] for each in every if each.get("original_max_position_embeddings")
        ]
        if length >= min([part.config.max_position_embeddings, *limits]):
            return False
    return True


def is_causal(mask: Tensor) -> bool:
    """Tell whether each of the last tokens sees all tokens before it, and itself, and nothing else: ``(b, 1, t,
    s)``."""
    t, s = mask.shape[-2:]
    plain = torch.ones(t, s, dtype=torch.bool, device=mask.device).tril(s - t)
    return mask.dtype == torch.bool and bool((mask == plain).all())


def plain_attention(
    module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Return ``(b, h, t, e)``, as transformers' own ``sdpa`` computes it."""
    return sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling)[0].transpose(1, 2)


IMPLEMENTATION = "lit_rl_folded"
"""The name of this attention in a model's config while it runs responses behind their prompts."""


class NotFolded(ConfigError, Unfit):
    """The error for a model whose attention is more than causal attention over prompt and own tokens."""

    def __init__(self, why: str) -> None:
        super().__init__(f"model.speedups.folded_attention=true cannot run this model: {why}. Set it to false.")
        self.why = why


def can_fold(model: nn.Module, mask: Tensor, p: int, rows: int) -> bool:
    """Tell whether a model may support this attention, at texts that are long enough for it to pay.

    On a CPU: on other devices it is not measured.

    Args:
        model: A causal language model.
        mask: Bool ``(n, p + t)``: the tokens of a row of each prompt. Prompts are padded left.
        p: Columns of the prompts.
        rows: Rows of all prompts.
    """
    base = base_of(model)
    if not isinstance(base, PreTrainedModel) or mask.device.type != "cpu":
        return False
    if text_config(base)._attn_implementation != "sdpa":
        return False
    n, s = mask.shape
    if not is_worth(rows / n, queries_per_key(text_config(base)), s - p, p):
        return False
    prompt = mask[:, :p]
    if not bool((prompt[:, 1:] >= prompt[:, :-1]).all()) or not bool(prompt[:, -1].all()):
        return False
    return keeps_whole_texts(DynamicCache(config=base.config), s)


class FoldedLayer(CacheLayerMixin):
    """Keys and values of one layer: those of the prompts, with gradient, and each row's own.

    Args:
        prompt_keys: ``(n, k, p, d)``.
        prompt_values: ``(n, k, p, e)``.
    """

    is_sliding = False

    def __init__(self, prompt_keys: Tensor, prompt_values: Tensor) -> None:
        super().__init__()
        self.prompt_keys, self.prompt_values = prompt_keys, prompt_values
        self.own: tuple[Tensor, Tensor] | None = None
        """The arguments and results of `update`, ``(b, k, t, d)`` and ``(b, k, t, e)``."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.own is not None:
            raise NotFolded("a layer caches keys twice")
        self.own = key_states, value_states
        return self.own

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.prompt_keys.shape[2] + (0 if self.own is None else self.own[0].shape[2])

    def get_max_length(self) -> int:
        return -1


class FoldedCache(Cache):
    """The cache of one call of a model, whose rows are the responses to prompts that it holds.

    Args:
        prompts: The cache of ``n`` prompts, which stays as it is; every layer holds all of their ``p`` tokens.
        prompt_of_row: Long ``(b,)``, ascending.
        mask: Bool ``(b, p + t)``: the tokens that are there. Prompts are padded on the left.
    """

    def __init__(self, prompts: Any, prompt_of_row: Tensor, mask: Tensor) -> None:
        super().__init__([FoldedLayer(layer.keys, layer.values) for layer in prompts.layers])
        p = prompts.layers[0].keys.shape[2]
        numbers, counts = prompt_of_row.unique_consecutive(return_counts=True)
        stops = counts.cumsum(0)
        padding = (~mask[stops - 1, :p]).sum(1)
        self.groups = [Sharers(*row) for row in torch.stack([numbers, stops - counts, stops, padding], 1).tolist()]
        own = mask[:, p:]
        # Where padding follows every row's last token, no token sees what comes after it.
        self.seen = own if bool((own[:, 1:] > own[:, :-1]).any()) else None

    def attend(self, module: nn.Module, layer: FoldedLayer, query: Tensor, scaling: float) -> Tensor:
        """Return ``(b, h, t, e)`` of a query ``(b, h, t, d)``, in the type in which ``sdpa`` would compute."""
        assert layer.own is not None
        kind, states = query.device.type, (query, layer.prompt_keys, layer.prompt_values, *layer.own)
        if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
            states = [part.to(torch.get_autocast_dtype(kind)) for part in states]
        with torch.autocast(kind, enabled=False):
            query, prompt_keys, prompt_values, keys, values = states
            return folded_attention(
                query, prompt_keys, prompt_values, keys, values, self.groups, seen=self.seen, scaling=scaling
            )


class ProvingFoldedCache(FoldedCache):
    """A cache that compares each attention with plain attention over repeated keys and values, in float64.

    Later layers get the latter, computed as plain ``sdpa`` computes it.
    """

    def __init__(self, prompts: Any, prompt_of_row: Tensor, mask: Tensor) -> None:
        super().__init__(prompts, prompt_of_row, mask)
        self._prompt_of_row, self._mask = prompt_of_row, mask

    def attend(self, module: nn.Module, layer: FoldedLayer, query: Tensor, scaling: float) -> Tensor:
        assert layer.own is not None
        shared = layer.prompt_keys, layer.prompt_values
        keys, values = (torch.cat([part[self._prompt_of_row], own], 2) for part, own in zip(shared, layer.own))
        t, s = query.shape[2], keys.shape[2]
        causal = torch.ones(t, s, dtype=torch.bool, device=query.device).tril(s - t)
        mask = causal & self._mask[:, None, None]
        twin = FoldedLayer(*(part.double() for part in shared))
        twin.own = layer.own[0].double(), layer.own[1].double()
        with torch.autocast(query.device.type, enabled=False):
            folded = super().attend(module, twin, query.double(), scaling)
            plain = plain_attention(module, query.double(), keys.double(), values.double(), mask, scaling)
        attended = self._mask[:, None, -t:, None].expand_as(folded)
        if not torch.allclose(folded[attended], plain[attended], rtol=1e-8, atol=1e-10):
            raise NotFolded("its attention over the shared keys differs from plain attention")
        return plain_attention(module, query, keys, values, mask, scaling)


@contextmanager
def attending_to(model: nn.Module, cache: FoldedCache) -> Iterator[dict[str, Any]]:
    """Let the model's layers look up this attention and its masks, inside; yield the inputs of the model beside
    tokens."""
    with using_attention(base_of(model), IMPLEMENTATION):
        yield {"attention_mask": None, "folded_cache": cache, **cache_input(model, cache)}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    folded_cache: FoldedCache | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend in the place of transformers' ``sdpa``; like it, ignore any other keyword but those that are refused.

    ``folded_cache`` gets here through the keywords of the model's forward pass.
    """
    if folded_cache is None:
        raise NotFolded("its layers do not hand keywords on to their attention")
    layer: Any = next(iter(folded_cache.layers[module.layer_idx :]), None)  # type: ignore[misc]
    if layer is None or layer.own is None or key is not layer.own[0] or value is not layer.own[1]:
        raise NotFolded("it attends to other keys or values than those of its cache")
    if attention_mask is not None or others.get("position_bias") is not None or others.get("is_causal") is False:
        raise NotFolded("it masks or biases single tokens")
    if query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1] or others.get("dropout"):
        raise NotFolded("it asks with other tokens than it caches, drops some out, or has uneven heads")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return folded_cache.attend(module, layer, query, scale).transpose(1, 2), None


def no_mask(*, attention_mask: Tensor | None = None, **arguments: Any) -> None:
    """Return no mask in the place of transformers' own for ``sdpa``: none is needed where every token sees all before
    it."""
    mask = sdpa_mask(attention_mask=attention_mask, **arguments)
    if mask is not None and not is_causal(mask):
        raise NotFolded("a token does not see all that came before it")


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, no_mask)
