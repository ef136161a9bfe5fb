"""The grouped cache (``generator.speedups.grouped_cache``): keys and values of a prompt held once a group.

A decode step has one query a row. With ``n`` prompts, ``m`` rows of each, ``k`` key heads that serve ``r`` query heads
each, prompts of ``p`` tokens and ``t`` tokens drawn so far, the scores of a layer are two products and one softmax:

    prompt  (n, k, m r, d) @ (n, k, d, p)         every query over a prompt is a row of one matrix
    own     (n m, k, r, d) @ (n m, k, d, t)       so the keys of a head are read once for its r queries
    softmax over the p + t scores of a query, in float32 or better

That is the softmax of plain attention over the same keys, split where the keys lie: nothing is approximated. A prompt's
keys are neither repeated over the group nor copied at a token; a row's own are written into a buffer that doubles when
it is full. Left padding of prompts is a bias of minus infinity on their scores.

16-bit products on a CPU read the whole buffer, and unwritten columns are hidden by the same bias: oneDNN builds a
kernel for each new shape, so a product over t tokens would cost more to build than to run, and one of a part of the
buffer copies it first. So do steps that are captured in a CUDA graph (``fast_decoding``): there the column of the next
token is a number on the device, and no shape depends on it.

Models reach the cache by two registries of transformers, under the name ``IMPLEMENTATION``: one of attention functions
and one of masks. Both are strict. They stand in for ``sdpa`` only, whose meaning is known: anything that plain
attention over the cached keys would not do raises `NotGrouped`.

A model is proven before its first batch, by a few tokens. It is decoded both ways with the same arithmetic, and its
logits have to agree; each of its attentions has to equal, in float64, the one over grouped keys. So anything that a
model's attention does beyond plain causal attention over its cache (windows shorter than the text, biases, sinks,
masked tokens, keys that are changed after they were cached) is found rather than looked up in a list of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lit_rl.core.errors import GenerationError
from lit_rl.generation.decoding import DecodingSteps, at_columns, empty_cache, joined, moved_up
from lit_rl.generation.generator import DecodeBatch
from lit_rl.models.forward_inputs import forward_parameters
from lit_rl.models.shared_attention import is_causal, keeps_whole_texts, plain_attention, text_config, using_attention
from lit_rl.models.trial import EquivalenceTrial, Unfit
from lit_rl.models.trunk import base_of

IMPLEMENTATION = "lit_rl_grouped"
"""The name of this attention in a model's config while it decodes."""

_FIRST_CAPACITY = 32
"""Tokens of a row that fit into the first buffer."""


class NotGrouped(GenerationError, Unfit):
    """A model whose attention needs more than one query a row over all cached keys."""

    def __init__(self, why: str) -> None:
        super().__init__(f"generator.speedups.grouped_cache=true cannot decode this model: {why}. Set it to false.")
        self.why = why


class GroupedLayer(CacheLayerMixin):
    """Keys and values of one layer: those of the prompts, and each row's own.

    Args:
        prompt_keys: ``(n, k, p, d)``.
        prompt_values: ``(n, k, p, e)``.
        max_new_tokens: A row's own are no more than this many.
        whole: Let products read the whole buffer for the rows' own tokens.
    """

    is_sliding = False

    def __init__(self, prompt_keys: Tensor, prompt_values: Tensor, max_new_tokens: int, *, whole: bool = False) -> None:
        super().__init__()
        self.prompt_keys, self.prompt_values = prompt_keys, prompt_values
        self._max_new_tokens = max_new_tokens
        self._whole = whole
        self._length = 0
        self._views: tuple[Tensor, Tensor] | None = None
        self.allocations = 0
        """The number of times that the rows' own tokens got new memory."""
        self.column: Tensor | None = None
        """Long ``(1,)``: the column of the next own token, while a step is captured; else the host knows it."""

    @property
    def own(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the own tokens, ``(b, k, t, d)`` and ``(b, k, t, e)``: views, and the last result of
        `update`."""
        if self._views is None and self.keys is not None and self.values is not None:
            self._views = self.keys[:, :, : self._length], self.values[:, :, : self._length]
        return self._views

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        """The operands of products: the rows' own tokens, or the whole buffer for them, zero where nothing is
        written."""
        if self.keys is None or not (self._whole or _builds_kernels(self.keys)):
            assert self.own is not None
            return self.own
        assert self.values is not None
        return self.keys, self.values

    @property
    def capacity_left(self) -> int:
        """The own tokens of each row that fit before new memory is allocated."""
        return 0 if self.keys is None else self.keys.shape[2] - self._length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        capacity = min(_FIRST_CAPACITY, self._max_new_tokens)
        self.keys, self.values = (self._in_buffer(states[:, :, :0], capacity) for states in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.column is not None:
            self.keys.index_copy_(2, self.column, key_states)
            self.values.index_copy_(2, self.column, value_states)
            self.count_written(1)
            return self.keys, self.values
        length = self._length + key_states.shape[2]
        if length > self.keys.shape[2]:
            # Beyond the most that a row may have only while there are holes, which are closed at once.
            capacity = max(min(2 * self._length, self._max_new_tokens), length)
            self.keys, self.values = (self._in_buffer(states, capacity) for states in (self.keys, self.values))
        self.keys[:, :, self._length : length] = key_states
        self.values[:, :, self._length : length] = value_states
        self.count_written(key_states.shape[2])
        assert self.own is not None
        return self.own

    def count_written(self, tokens: int) -> None:
        """Count tokens that every row has got."""
        self._length, self._views = self._length + tokens, None

    @property
    def own_length(self) -> int:
        """The columns of the rows' own tokens."""
        return self._length

    def keep(self, rows: Tensor, prompts: Tensor | None, unused: tuple[int, int]) -> None:
        """Keep these rows, and these prompts; None keeps all prompts.

        ``unused``: columns of the prompts, and of the rows' own, that are padding in all that stay.
        """
        of_prompts, of_rows = unused
        if prompts is not None:
            self.prompt_keys = self.prompt_keys[prompts, :, of_prompts:]
            self.prompt_values = self.prompt_values[prompts, :, of_prompts:]
        if self.own is not None:
            assert self.keys is not None
            keys, values = self.own
            self._own(keys[rows, :, of_rows:], values[rows, :, of_rows:], capacity=self.keys.shape[2])

    def shift(self, index: Tensor, unused: int) -> None:
        """Read the rows' own tokens at other columns, long ``(b, t)``, and drop the first ``unused`` ones."""
        assert self.own is not None
        keys, values = (at_columns(states, index)[:, :, unused:] for states in self.own)
        self._own(keys, values, capacity=max(min(2 * keys.shape[2], self._max_new_tokens), keys.shape[2]))

    def join(self, others: GroupedLayer, rows: tuple[int, int], prompts: Tensor) -> None:
        """Append the rows of another layer, and the given prompts of it; padded on the left.

        ``rows``: the number of rows of each.
        """
        own = [layer.own or layer.no_tokens(count) for layer, count in zip((self, others), rows)]
        self.prompt_keys = joined(self.prompt_keys, others.prompt_keys[prompts])
        self.prompt_values = joined(self.prompt_values, others.prompt_values[prompts])
        keys, values = (joined(*both) for both in zip(*own))
        self._own(
            keys,
            values,
            capacity=max(min(max(2 * keys.shape[2], _FIRST_CAPACITY), self._max_new_tokens), keys.shape[2]),
        )
        self.is_initialized = True
        others.keys = others.values = others._views = None  # used up: not all of it is held twice until the last layer
        del others.prompt_keys, others.prompt_values

    def no_tokens(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of rows without any token of their own."""
        keys, values = (states[:1, :, :0].expand(rows, -1, -1, -1) for states in (self.prompt_keys, self.prompt_values))
        return keys, values

    def _own(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        self._length, self._views = keys.shape[2], None
        self.keys, self.values = self._in_buffer(keys, capacity), self._in_buffer(values, capacity)

    def _in_buffer(self, states: Tensor, capacity: int) -> Tensor:
        """Return `(b, k, t, d)` at the head of new memory for `capacity` tokens."""
        b, k, t, d = states.shape
        wide = states.new_empty(b, k, capacity, d)
        wide[:, :, :t] = states
        if self._whole or _builds_kernels(states):
            wide[:, :, t:] = 0  # it is read, and what is hidden must be finite
        self.allocations += 1
        return wide

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.prompt_keys.shape[2] + self._length

    def get_max_length(self) -> int:
        return self.prompt_keys.shape[2] + self._max_new_tokens


def _builds_kernels(states: Tensor) -> bool:
    """Tell whether a product of such numbers builds a kernel for its shape."""
    return states.device.type == "cpu" and states.dtype in (torch.bfloat16, torch.float16)


class GroupedCache(Cache):
    """The cache of a model's forward pass while rows of a group share their prompt.

    Args:
        prompts: The cache of ``n`` prompts, each read once; every layer holds all of its ``p`` tokens.
        prompt_mask: Bool ``(n, p)``.
        repeats: Rows of each prompt, which are neighbours.
        max_new_tokens: A row's own tokens are no more than this many.
        names: The names of the prompts: equal names are equal keys and values.
        padded: True where a prompt is padded.
        whole: See `GroupedLayer`.
    """

    def __init__(
        self,
        prompts: Any,
        prompt_mask: Tensor,
        repeats: int,
        max_new_tokens: int,
        names: Sequence[int],
        *,
        padded: bool = True,
        whole: bool = False,
    ) -> None:
        super().__init__(
            [GroupedLayer(layer.keys, layer.values, max_new_tokens, whole=whole) for layer in prompts.layers]
        )
        self._prompt_of = torch.arange(len(prompt_mask), device=prompt_mask.device).repeat_interleave(repeats)
        # Queries stand in a table of prompts by places. Row i has place i of it until rows are dropped.
        self._table = len(prompt_mask), repeats
        self._place: Tensor | None = None
        self._padding = ~prompt_mask[:, None, None] if padded else None
        # First column of the own tokens of each row, `(b,)`. None: all in the first one.
        self._starts: Tensor | None = None
        self._before: Tensor | None = None
        self._hides = 0, 0
        self._column: Tensor | None = None
        # Own columns that each query of a chunk may see, `(b, c, t)`; None while rows get a token each.
        self._seen: Tensor | None = None
        self._names = list(names)

    @property
    def own_length(self) -> int:
        """The columns of the rows' own tokens."""
        layers: list[Any] = self.layers
        return layers[0].own_length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows only, long ``(b,)``, ascending."""
        alive, prompt_of = self._prompt_of[indices].unique(return_inverse=True)
        prompts = alive if len(alive) < self._table[0] else None
        unused = self._unused(indices, prompts)
        layers: list[Any] = self.layers
        for layer in layers:
            layer.keep(indices, prompts, unused)
        if prompts is not None:
            self._names = [self._names[i] for i in prompts.tolist()]
            if self._padding is not None:
                self._padding = self._padding[prompts, :, :, unused[0] :]
        if self._starts is not None:
            self._set_own_starts(self._starts[indices] - unused[1])
        self._assign_places(prompt_of)

    def join(self, others: GroupedCache) -> None:
        """Append the rows of another cache. A prompt that both have is held once."""
        rows, device = (len(self._prompt_of), len(others._prompt_of)), self._prompt_of.device
        length = max(self.own_length, others.own_length)
        self._set_own_starts(torch.cat([part._own_starts() + length - part.own_length for part in (self, others)]))
        new = [i for i, name in enumerate(others._names) if name not in self._names]
        self._names = [*self._names, *(others._names[i] for i in new)]  # a part that was split has the old list
        number = torch.tensor([self._names.index(name) for name in others._names], device=device)
        padding = [self._whole_padding(), others._whole_padding()[new]]
        width = max(part.shape[-1] for part in padding)
        whole = torch.cat([nn.functional.pad(part, (width - part.shape[-1], 0), value=True) for part in padding])
        for mine, theirs in zip(self.layers, others.layers, strict=True):
            mine.join(theirs, rows, torch.tensor(new, dtype=torch.long, device=device))  # type: ignore[attr-defined]
        self._padding = whole if bool(whole.any()) else None
        self._assign_places(torch.cat([self._prompt_of, number[others._prompt_of]]))

    @contextmanager
    def reading(self, mask: Tensor) -> Iterator[None]:
        """Enter the state in which rows read a chunk, with valid tokens where ``mask`` ``(b, c)`` is set: first, then
        padding."""
        columns, width = torch.arange(self.own_length, device=mask.device), mask.shape[1]
        before = (columns >= self._own_starts()[:, None])[:, None].expand(-1, width, -1)
        causal = torch.ones(width, width, dtype=torch.bool, device=mask.device).tril()
        self._seen = torch.cat([before, mask[:, None] & causal], -1)
        try:
            yield
        finally:
            self._seen = None

    @contextmanager
    def writing_at(self, column: Tensor) -> Iterator[None]:
        """Enter the state in which a step is captured: its tokens go to a column that stands on the device, long
        ``(1,)``, and is incremented. The host counts the step, and `count_written` its replays."""
        self._write_at(column)
        try:
            yield
            column.add_(1)
        finally:
            self._write_at(None)

    def _write_at(self, column: Tensor | None) -> None:
        self._column, self._before = column, None
        layers: list[Any] = self.layers
        for layer in layers:
            layer.column = column

    def count_written(self) -> None:
        """Count a token that every row has got by a replayed step."""
        layers: list[Any] = self.layers
        for layer in layers:
            layer.count_written(1)

    def shift(self, columns: Tensor) -> None:
        """Drop as many of the last own columns of each row, ``(b,)``, and move the others up to the end."""
        if not bool(columns.any()):
            return
        index, begin = moved_up(self.own_length, columns), self._own_starts() + columns
        unused = int(begin.min())
        layers: list[Any] = self.layers
        for layer in layers:
            layer.shift(index, unused)
        self._set_own_starts(begin - unused)

    @property
    def prompts(self) -> int:
        """The number of prompts that are held."""
        return len(self._names)

    def _set_own_starts(self, begin: Tensor) -> None:
        self._starts, self._before = begin, None

    def _own_starts(self) -> Tensor:
        return torch.zeros_like(self._prompt_of) if self._starts is None else self._starts

    @property
    def chunk(self) -> int | None:
        """The tokens that every row reads now; None where it is one."""
        return None if self._seen is None else self._seen.shape[1]

    def _assign_places(self, prompt_of: Tensor) -> None:
        """Give every row a place in the table of prompts by places."""
        self._prompt_of, rows = prompt_of, prompt_of.bincount(minlength=len(self._names))
        self._table = len(rows), int(rows.max())
        order = prompt_of.argsort(stable=True)
        sorted_rank = torch.arange(len(prompt_of), device=prompt_of.device) - (rows.cumsum(0) - rows)[prompt_of[order]]
        rank = torch.empty_like(order).index_copy_(0, order, sorted_rank)
        self._place = prompt_of * self._table[1] + rank

    def _whole_padding(self) -> Tensor:
        """Return bool `(n, 1, 1, p)`: the padding of the prompts."""
        if self._padding is not None:
            return self._padding
        layer: Any = self.layers[0]
        keys = layer.prompt_keys
        return torch.zeros(len(keys), 1, 1, keys.shape[2], dtype=torch.bool, device=keys.device)

    def _unused(self, rows: Tensor, prompts: Tensor | None) -> tuple[int, int]:
        """Return the columns of the prompts, and of the rows' own, that are padding in all of these. Without a join,
        none."""
        if self._starts is None:
            return 0, 0
        of_prompts = 0
        if prompts is not None and self._padding is not None:
            of_prompts = int((~self._padding[prompts]).any(0).flatten().int().argmax())
        return of_prompts, int(self._starts[rows].min())

    def _hidden(self, length: int, columns: int) -> Tensor | None:
        """Return bool `(b or 1, 1, 1, columns)`: the columns without an own token of each row, while `length` are
        written."""
        if self._starts is None and length == columns and self._column is None:
            return None
        if self._before is None or self._hides != (length, columns):
            index = torch.arange(columns, device=self._prompt_of.device)
            hidden = (index >= length if self._column is None else index > self._column)[None]
            if self._starts is not None:
                hidden = hidden | (index < self._starts[:, None])
            self._before, self._hides = hidden[:, None, None], (length, columns)
        return self._before

    def attend(self, module: nn.Module, layer: GroupedLayer, query: Tensor, scaling: float) -> Tensor:
        """Return the attention of the queries of a row over its prompt and its own tokens; only a chunk has several
        queries.

        Args:
            module: The attention module.
            layer: The keys and values.
            query: ``(b, k r, c, d)``.
            scaling: The factor of the scores.

        Returns:
            ``(b, k r, c, e)``.
        """
        keys, values = layer.operands
        b, heads, c, d = query.shape
        query = query.reshape(b, keys.shape[1], heads // keys.shape[1] * c, d) * scaling
        of_prompt = torch.matmul(self._by_prompt(query), layer.prompt_keys.mT)
        if self._padding is not None:
            of_prompt = of_prompt.masked_fill(self._padding, -torch.inf)
        of_own = torch.matmul(query, keys.mT)
        if self._seen is not None:
            seen = nn.functional.pad(self._seen, (0, keys.shape[2] - self._seen.shape[2]))
            of_own = of_own.masked_fill(~seen.repeat(1, heads // keys.shape[1], 1)[:, None], -torch.inf)
        elif (hidden := self._hidden(layer.own_length, keys.shape[2])) is not None:
            of_own = of_own.masked_fill(hidden, -torch.inf)
        scores = torch.cat([self._by_row(of_prompt, b), of_own], -1)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).to(values.dtype)
        p = of_prompt.shape[-1]
        drawn = torch.matmul(self._by_prompt(weights[..., :p]), layer.prompt_values)
        return (self._by_row(drawn, b) + torch.matmul(weights[..., p:], values)).reshape(b, heads, c, -1)

    def _by_prompt(self, x: Tensor) -> Tensor:
        """Reorder `(b, k, r, w)` to `(n, k, m r, w)`."""
        n, m = self._table
        if self._place is not None:
            x = x.new_zeros(n * m, *x.shape[1:]).index_copy_(0, self._place, x)
        _, k, r, w = x.shape
        return x.reshape(n, m, k, r, w).transpose(1, 2).reshape(n, k, m * r, w)

    def _by_row(self, x: Tensor, b: int) -> Tensor:
        """Reorder back to `b` rows."""
        n, m = self._table
        _, k, _, w = x.shape
        x = x.reshape(n, k, m, -1, w).transpose(1, 2).reshape(n * m, k, -1, w)
        return x if self._place is None else x[self._place]


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    grouped_cache: GroupedCache | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention over a grouped cache in place of transformers' ``sdpa``, which also ignores all other keywords
    but the refused ones.

    ``grouped_cache`` arrives through the keywords of the model's forward pass.
    """
    if grouped_cache is None:
        raise NotGrouped("its layers do not hand keywords on to their attention")
    layer: Any = next(iter(grouped_cache.layers[module.layer_idx :]), None)  # type: ignore[misc]
    if layer is None or layer.own is None or key is not layer.own[0] or value is not layer.own[1]:
        raise NotGrouped("it attends to other keys or values than those of its cache")
    if attention_mask is not None or others.get("position_bias") is not None:
        raise NotGrouped("it masks or biases single tokens")
    chunk = 1 if grouped_cache.chunk is None else grouped_cache.chunk
    if query.shape[2] != chunk or query.shape[1] % key.shape[1] or others.get("dropout"):
        raise NotGrouped("it asks with several tokens a row, drops some out, or has uneven heads")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return grouped_cache.attend(module, layer, query, scale).transpose(1, 2), None


def no_mask(*, attention_mask: Tensor | None = None, **asked: Any) -> None:
    """Refuse any mask but a causal one, in place of transformers' mask function for ``sdpa``.

    A step needs none where every token sees all earlier ones: no window ends before the first, and no mask is custom.
    """
    mask = sdpa_mask(attention_mask=attention_mask, **asked)
    if mask is not None and (mask.shape[-2] == 1 or not is_causal(mask)):
        raise NotGrouped("a token does not see all that came before it")


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, grouped_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, no_mask)


# ------------------------------------------------------------------ decode steps


class GroupedSteps(DecodingSteps):
    """Decode steps with the keys and values of a prompt held once a group, for a policy that `grouped_cache_proven`
    approves."""

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
        with using_attention(base_of(self._policy), IMPLEMENTATION):
            return self._run(ids, self._next_position, attention_mask=None, grouped_cache=self._cache)

    @property
    def prompts(self) -> int:
        return self._cache.prompts

    def _read(self, ids: Tensor, mask: Tensor, positions: Tensor, lasts: Tensor, **seen: Tensor) -> Tensor:
        with using_attention(base_of(self._policy), IMPLEMENTATION), self._cache.reading(mask):
            return self._logits(ids, positions, lasts, attention_mask=None, grouped_cache=self._cache, **seen)

    def _shift(self, columns: Tensor) -> None:
        self._cache.shift(columns)

    def _keep_cache(self, kept: Tensor) -> None:
        self._cache.batch_select_indices(kept)

    def _join_cache(self, others: DecodingSteps) -> None:
        self._cache.join(others._cache)


def fits_grouped_cache(policy: nn.Module, length: int) -> bool:
    """Tell whether a policy may be able to: a model of transformers with its ``sdpa`` attention, whose cache keeps
    every token of texts of ``length``."""
    model = base_of(policy)
    if not isinstance(model, PreTrainedModel) or "position_ids" not in forward_parameters(policy):
        return False
    return text_config(model)._attn_implementation == "sdpa" and keeps_whole_texts(empty_cache(policy), length)


# ------------------------------------------------------------------ the proof of a model

_GROUPED_TRIAL = EquivalenceTrial(
    "generator.speedups.grouped_cache", "Each sample has its prompt's keys and values for itself", most=0.01
)
"""On deterministic kernels the logits of the two ways are equal."""


def grouped_cache_proven(policy: nn.Module, length: int) -> bool:
    """Decode a few tokens of two prompts both ways, and compare, where a policy `fits_grouped_cache` at all.

    Call it in evaluation mode, without gradient. ``length``: tokens of the longest text.
    """
    return fits_grouped_cache(policy, length) and _GROUPED_TRIAL.passes(
        policy, lambda: decode_both_ways(policy, partial(_GroupedProvingSteps, policy))
    )


class GroupedProvingCache(GroupedCache):
    """A cache that compares each attention with plain attention over repeated and joined keys and values, in float64.

    Later layers get the latter, computed as plain ``sdpa`` computes it. So a model that uses this cache as intended
    gets the logits of the plain way to the last bits, whatever its weights' type.
    """

    def attend(self, module: nn.Module, layer: GroupedLayer, query: Tensor, scaling: float) -> Tensor:
        assert layer.own is not None
        shared = layer.prompt_keys, layer.prompt_values
        keys, values = (torch.cat([part[self._prompt_of], own], 2) for part, own in zip(shared, layer.own))
        # Bool `(b, 1, c, p + t)`: the tokens of its prompt and its own that each query sees.
        own = torch.arange(layer.own[0].shape[2], device=query.device)
        of_own = (own >= self._own_starts()[:, None])[:, None, None] if self._seen is None else self._seen[:, None]
        of_prompt = ~self._whole_padding()[self._prompt_of]
        seen = torch.cat([of_prompt.expand(-1, 1, query.shape[2], -1), of_own], -1)
        mask = None if bool(seen.all()) else seen
        wide = GroupedLayer(layer.prompt_keys.double(), layer.prompt_values.double(), 0)
        wide._views, wide._length = (layer.own[0].double(), layer.own[1].double()), layer.own_length
        with torch.autocast(query.device.type, enabled=False):
            ours = super().attend(module, wide, query.double(), scaling)
            theirs = plain_attention(module, query.double(), keys.double(), values.double(), mask, scaling)
        if not torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10, equal_nan=True):
            raise NotGrouped("its attention over the grouped keys differs from plain attention")
        return plain_attention(module, query, keys, values, mask, scaling)


class _GroupedProvingSteps(GroupedSteps):
    kind = GroupedProvingCache


def decode_both_ways(policy: nn.Module, quicker: Callable[[DecodeBatch, int], DecodingSteps]) -> tuple[Tensor, Tensor]:
    """Return the logits of a `probe_batch` by quicker steps, and by the model's own; see `decode_probe`."""
    batch = probe_batch(policy)
    own = decode_probe(DecodingSteps(policy, batch, 5))
    return decode_probe(quicker(batch, 5)), own


def probe_batch(policy: nn.Module) -> DecodeBatch:
    """Return a batch of two prompts of five and three tokens, two rows each."""
    device = next(policy.parameters()).device
    size = text_config(base_of(policy)).vocab_size
    ids = (torch.arange(10, device=device) * 7 + 1).view(2, 5) % size
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :2] = False
    rows = torch.arange(4)
    return DecodeBatch(ids, mask, 2, rows.to(device), rows, [0, 1])


def decode_probe(steps: DecodingSteps) -> Tensor:
    """Return logits ``(4, 4, v)`` of a `probe_batch` with five new tokens at most: of two steps with another token for
    every row, one with several tokens, and one more."""
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
