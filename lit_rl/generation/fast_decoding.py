"""Faster decode steps over a grouped cache: lean steps (``generator.speedups.lean_steps``), and CUDA graphs of them.

A decode step of a small model is hundreds of operations on a few rows, and the code around them takes as long as they
do: modules within modules, masks that are not needed, cosines of every token. A lean step is the operations alone, for
the decoder layer of Llama:

    x = embedding(ids)
    per layer:  x += o(attention(turn(q(norm(x))), turn(k(norm(x))), v(norm(x))))      over the grouped cache
                x += down(act(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

with one operation for an RMSNorm, one for the rotation of queries and keys together, and a table of cosines and sines.
Weights are read where the model has them, so nothing is copied; adapters are added as PEFT adds them, and not merged:
a merged weight of 16 bits would lose most of what an adapter has learned, and tokens are drawn with the arithmetic that
scores them. Modules that are neither plain linear layers nor plain LoRA compute their own products.

Models are recognised by their parts, and by an attention that knows positions by its angles alone: other uses of
positions could begin far behind the few tokens of a proof. Then they are proven: each operation is compared with its
module, and the logits of the whole with those of the model. Llama, Qwen2, Qwen3, Mistral and SmolLM2 fit; any other
model decodes over the grouped cache without lean steps, and so does one with hooks, a compiled or a sharded one.

A CUDA graph (``generator.speedups.cuda_graphs``) holds the launches of one lean step, because a host takes longer to
launch some thousand operations on few rows than a GPU to compute them. The newest tokens are given to the model, the
next ones are drawn and written, and turns that an EOS or a length ends are marked. A graph is replayed by one call, as
often as there are steps between two looks of the decode loop. Looks, stop strings, rows that leave, join or read an
answer, and growth of the buffer for own tokens stay with the host.

A graph reads and writes the memory and the shapes that it was captured with. So

- keys and values are read in the whole buffer (`GroupedLayer`), and written at a column that stands on the device;
- it serves as long as rows and buffer stay. Then a few steps are launched one by one, which also prepares libraries,
  and the next is captured. As a rule rows change when a quarter of them is finished and the buffer when it doubles: a
  rollout has a graph for each number of rows and each size of the buffer, one at a time, in their order;
- host counters of a step are counted again at each replay.

A model is proven before its first batch: it takes a few of the same steps launched and replayed, and its logits have
to agree. A number that the host baked into a graph, such as a position, shows at the second replay.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_rl.generation.generator import DecodeBatch
from lit_rl.generation.grouped_cache import (
    GroupedCache,
    GroupedProvingCache,
    GroupedSteps,
    decode_both_ways,
    probe_batch,
)
from lit_rl.models.kernels import computes_as_its_class
from lit_rl.models.trial import EquivalenceTrial, Unfit
from lit_rl.models.trunk import base_of

Operation = Callable[[Tensor], Tensor]


class LeanModel:
    """A model that `fits_lean_steps`, as operations: the logits of the next token, one token a row.

    It holds the current weights: made for each rollout, in evaluation mode, without gradient, under the autocast that
    it runs under.

    Args:
        policy: The model, or PEFT's wrapper of it.
        length: Tokens of the longest text.
    """

    def __init__(self, policy: nn.Module, length: int) -> None:
        model = base_of(policy)
        decoder = model.model
        self._embed, self._norm, self._head = decoder.embed_tokens, self._piece(decoder.norm), model.lm_head
        self._layers = [_Layer(layer, self._piece) for layer in decoder.layers[: model.config.num_hidden_layers]]
        device = decoder.embed_tokens.weight.device
        places = torch.arange(length, device=device)
        cos, sin = decoder.rotary_emb(self._embed(places[:1] * 0), places[None])
        half = cos.shape[-1] // 2
        self._cos, self._sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)

    def __call__(self, ids: Tensor, positions: Tensor, cache: GroupedCache) -> Tensor:
        """Return float32 ``(b, v)``, of the tokens ``ids`` at ``positions``, both long ``(b,)``; they join the
        cache."""
        x = self._embed(ids)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        for layer in self._layers:
            query, key, value = layer.heads(layer.before_attention(x))
            turned = self._turned(torch.cat([query, key], 1), cos, sin).to(value.dtype)  # float32 under autocast
            heads = query.shape[1]
            held: Any = cache.layers[layer.number]
            held.update(turned[:, heads:, None], value[:, :, None])
            attended = cache.attend(layer.attention, held, turned[:, :heads, None], layer.attention.scaling)
            x = x + layer.output(attended.flatten(1))
            x = x + layer.mlp(layer.before_mlp(x))
        return self._head(self._norm(x)).float()

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply rotary embedding (2104.09864) to heads `(b, h, d)`; `sin` has the sign of the rotated halves in it."""
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    def _piece(self, module: nn.Module) -> Operation:
        """Return the operation of a known module, or the module itself."""
        if _is_norm(module):
            weight: Any = module.weight
            shape, eps = tuple(weight.shape), float(module.variance_epsilon)  # type: ignore[arg-type]

            def norm(x: Tensor) -> Tensor:
                if x.dtype == weight.dtype:
                    return F.rms_norm(x, shape, weight, eps)
                return weight * F.rms_norm(x, shape, None, eps)  # queries and keys under autocast

            return norm
        if type(module) is nn.Linear and not _is_hooked(module):
            return _linear(module)
        return _lora(module) or module


class _Layer:
    """The operations of a decoder layer."""

    def __init__(self, layer: Any, piece: Callable[[nn.Module], Operation]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention, self.number = attention, attention.layer_idx
        self.before_attention, self.before_mlp = piece(layer.input_layernorm), piece(layer.post_attention_layernorm)
        self._query, self._key, self._value = (piece(getattr(attention, f"{name}_proj")) for name in "qkv")
        norms = (piece(attention.q_norm), piece(attention.k_norm)) if hasattr(attention, "q_norm") else None
        self._qk_norms, self._width = norms, attention.head_dim
        self.output = piece(attention.o_proj)
        self._gate, self._up, self._down = piece(mlp.gate_proj), piece(mlp.up_proj), piece(mlp.down_proj)
        self._act = mlp.act_fn

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `(b, heads, d)` of tokens `(b, w)`."""
        query, key, value = (part(x).view(len(x), -1, self._width) for part in (self._query, self._key, self._value))
        if self._qk_norms is not None:
            query, key = self._qk_norms[0](query), self._qk_norms[1](key)
        return query, key, value

    def mlp(self, x: Tensor) -> Tensor:
        return self._down(self._act(self._gate(x)) * self._up(x))


class LeanSteps(GroupedSteps):
    """Decode steps over a grouped cache by a `LeanModel`; the model itself reads prompts and chunks.

    Args:
        model: The operations of the steps.
        policy: The model itself.
        batch: The rows to begin with.
        max_new_tokens: See `DecodingSteps`.
    """

    def __init__(self, model: LeanModel, policy: nn.Module, batch: DecodeBatch, max_new_tokens: int) -> None:
        self._lean = model
        super().__init__(policy, batch, max_new_tokens)

    def _share_out(self, batch: DecodeBatch) -> None:
        layers: list[Any] = self._cache.layers
        for layer in layers:  # transformers holds them in float32 under autocast, and each product would narrow them
            kind = _of_autocast(layer.keys) or layer.keys.dtype
            layer.keys, layer.values = layer.keys.to(kind), layer.values.to(kind)
        super()._share_out(batch)

    def _step(self, ids: Tensor) -> Tensor:
        return self._lean(ids[:, 0], self._next_position[:, 0], self._cache)


# ------------------------------------------------------------------ operations of modules


def _linear(module: Any) -> Operation:
    weight, bias = _as_multiplied(module.weight), None if module.bias is None else _as_multiplied(module.bias)
    return lambda x: F.linear(x, weight, bias)


def _as_multiplied(weight: Tensor) -> Tensor:
    """Return the weight in the type of autocast, which caches its own narrow copies of trained weights only."""
    kind = None if weight.requires_grad or weight.dtype != torch.float32 else _of_autocast(weight)
    return weight if kind is None else weight.to(kind)


def _of_autocast(tensor: Tensor) -> torch.dtype | None:
    """Return the type of such tensors in products under autocast; None where it is off."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _lora(module: Any) -> Operation | None:
    """Return the operation of a plain linear layer with plain LoRA, as PEFT computes it; None for any other module."""
    from peft.tuners.lora.layer import Linear

    if type(module) is not Linear or module.disable_adapters or module.merged or module.lora_variant:
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    sides = [(module.lora_A[name], module.lora_B[name], module.scaling[name]) for name in active]
    parts = [part for one, other, _ in sides for part in (one, other)]
    base = module.get_base_layer()
    if any(type(part) is not nn.Linear for part in (base, *parts)):
        return None
    if any(_is_hooked(part) for part in (module, base, *parts, *(module.lora_dropout[name] for name in active))):
        return None
    whole, adapters = _linear(base), [_adapter(*side) for side in sides]

    def product(x: Tensor) -> Tensor:
        result = whole(x)
        kind = result.dtype
        for add in adapters:
            result = add(result, x)
        return result.to(kind)

    return product


def _adapter(narrow: Any, wide: Any, scaling: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that adds LoRA's product of `x`, in its own type, as PEFT does."""
    first, second, dtype = _linear(narrow), _linear(wide), narrow.weight.dtype
    if wide.bias is not None or torch.is_autocast_enabled(wide.weight.device.type):
        return lambda result, x: result + second(first(x.to(dtype))) * scaling
    transposed = wide.weight.t()

    def add(result: Tensor, x: Tensor) -> Tensor:
        if result.dtype.itemsize > dtype.itemsize:
            return result + second(first(x.to(dtype))) * scaling
        return torch.addmm(result.to(dtype), first(x.to(dtype)), transposed, alpha=scaling)

    return add


# ------------------------------------------------------------------ models that take lean steps

_MODEL = {"model", "lm_head"}
_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_QK_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}

_STATIC_ROTATIONS = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary embeddings whose angles depend on the position alone; others look at the longest text so far."""

_OF_POSITIONS = {"position_ids", "cache_position", "get_seq_length", "arange"}
"""Names in the code of an attention that reads positions itself. Llama's gets the angles only."""


def fits_lean_steps(policy: nn.Module) -> bool:
    """Tell whether a model has the parts of Llama's decoder, and its modules do nothing beside their forward."""
    model = base_of(policy)
    decoder = getattr(model, "model", None)
    if decoder is None or _names(model) != _MODEL or _names(decoder) != _DECODER or not _is_norm(decoder.norm):
        return False
    if getattr(decoder.rotary_emb, "rope_type", None) not in _STATIC_ROTATIONS:
        return False
    if not all(_is_layer(layer) for layer in decoder.layers):
        return False
    types = {norm.weight.dtype for norm in decoder.modules() if _is_norm(norm)}
    return types == {decoder.embed_tokens.weight.dtype} and not any(map(_is_hooked, _bypassed(policy)))


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_layer(layer: Any) -> bool:
    if _names(layer) != _LAYER or _names(layer.mlp) != _MLP:
        return False
    attention = layer.self_attn
    if _reads_positions(attention):
        return False
    if not _is_norm(layer.input_layernorm) or not _is_norm(layer.post_attention_layernorm):
        return False
    if _names(attention) == _ATTENTION:
        return True
    norms: list[Any] = [getattr(attention, name, None) for name in _QK_NORMS]
    width = getattr(attention, "head_dim", None)
    # Some norm all heads together.
    narrow = all(_is_norm(norm) and norm.weight.shape == (width,) for norm in norms)
    return _names(attention) == _ATTENTION | _QK_NORMS and narrow


def _reads_positions(attention: nn.Module) -> bool:
    """Tell whether its forward uses positions beside the rotation: a few tokens may not show it.

    Ministral3 multiplies queries by a factor that is 1 up to its pretraining length.
    """
    code: CodeType = inspect.unwrap(type(attention).forward).__code__
    strings = {value for value in code.co_consts if isinstance(value, str)}
    return not _OF_POSITIONS.isdisjoint({*code.co_names, *code.co_varnames, *strings})


def _is_norm(module: Any) -> bool:
    """Tell whether it is an RMSNorm with a weight, as transformers writes it."""
    return hasattr(module, "variance_epsilon") and [name for name, _ in module.named_parameters()] == ["weight"]


def _bypassed(policy: Any) -> Iterator[nn.Module]:
    """Yield the modules that are not called."""
    model = base_of(policy)
    if policy is not model:  # PEFT's wrapper, and what it holds around the model
        yield from (policy, policy.base_model)
    decoder: Any = model.model
    yield from (model, decoder, decoder.norm, decoder.rotary_emb)
    for layer in decoder.layers:
        yield from (layer, layer.self_attn, layer.mlp)
        yield from (part for part in layer.modules() if _is_norm(part))


def _is_hooked(module: nn.Module) -> bool:
    """Tell whether a call of it is more than its class's forward: hooks, a compiled call, a forward of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or module._compiled_call_impl is not None or not computes_as_its_class(module)


_LEAN_TRIAL = EquivalenceTrial(
    "generator.speedups.lean_steps", "The model's own modules take its decode steps", most=1e-3
)
"""On deterministic kernels the logits of the two ways are equal."""

_ROUNDINGS = 8
"""Roundings of the largest number of a tensor, by which an operation may differ from its module."""


def lean_steps_proven(policy: nn.Module) -> bool:
    """Decode a few tokens of two prompts both ways, and compare, where a model `fits_lean_steps` at all.

    Call it in evaluation mode, without gradient.
    """
    return fits_lean_steps(policy) and _LEAN_TRIAL.passes(
        policy, lambda: decode_both_ways(policy, partial(_LeanProvingSteps, _LeanProvingModel(policy, 16), policy))
    )


class _LeanProvingModel(LeanModel):
    """A lean model that compares each operation with its module, and continues with the module's result: so a correct
    whole gives the model's logits to the last bits, for any type of the weights."""

    def _piece(self, module: nn.Module) -> Operation:
        piece = super()._piece(module)

        def both(x: Tensor) -> Tensor:
            expected = module(x)
            _refuse_difference(type(module).__name__, piece(x), expected, x)
            return expected

        return both

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        expected = x * cos + torch.cat([other, one], -1) * sin
        _refuse_difference("its rotary embedding", super()._turned(x, cos, sin), expected, x)
        return expected


class _LeanProvingSteps(LeanSteps):
    kind = GroupedProvingCache


def _refuse_difference(what: str, result: Tensor, expected: Tensor, x: Tensor) -> None:
    """Raise Unfit where an operation differs from its module."""
    eps = max(torch.finfo(part.dtype).eps for part in (expected, x))
    apart, largest = (part.abs().max().item() for part in (result - expected, expected))
    if result.dtype != expected.dtype:
        raise Unfit(f"{what} gives {expected.dtype}, and its operation {result.dtype}")
    if not apart <= _ROUNDINGS * eps * largest:
        raise Unfit(
            f"{what} and its operation differ on {x.device.type} by {apart:.2g}: {apart / (eps * largest):.1f} "
            f"roundings of its largest number, and {_ROUNDINGS} are allowed"
        )


# ------------------------------------------------------------------ CUDA graphs of lean steps

_WARMUP_STEPS = 4
"""Steps that are launched one by one before one is captured: for rows and a buffer that stay for fewer, a graph would
cost more than it saves. An estimate: to capture a step takes the host about as long as to launch it, and to make a
graph of it some milliseconds. The last of them runs on the stream of the capture, as PyTorch asks for."""


class GraphedSteps(LeanSteps):
    """Lean steps that can be captured: no shape depends on the number of tokens of a row."""

    whole = True

    @property
    def capacity_left(self) -> int:
        """The own tokens of each row that fit before new memory is allocated."""
        layer: Any = self._cache.layers[0]
        return layer.capacity_left

    @property
    def allocations(self) -> int:
        """The number of times that the rows' own tokens got new memory: whenever rows leave or join, and when it
        grows."""
        layer: Any = self._cache.layers[0]
        return layer.allocations

    @property
    def own_length(self) -> int:
        """The columns of the rows' own tokens."""
        return self._cache.own_length

    def capture(self, step: Callable[[], None], column: Tensor) -> None:
        """Take a step whose tokens go to a column that stands on the device, long ``(1,)``."""
        with self._cache.writing_at(column):
            step()

    def replayed(self) -> None:
        """Count a replayed step."""
        self._cache.count_written()


class StepGraphs:
    """Steps that are launched one by one, or replayed by a graph once rows and buffer have stayed for a few of them.

    Args:
        device: The device of the rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of: tuple[Any, int] | None = None
        self._plain = 0
        self._graph: _StepGraph | None = None
        self.replays = 0
        """Number of replayed steps."""

    def __call__(
        self,
        step: Callable[[Tensor], Tensor],
        replayed: Callable[[], None],
        steps: Any,
        tokens: Tensor,
    ) -> Tensor:
        """Return the next tokens of the rows, long ``(b,)``; the next call may overwrite their memory.

        Args:
            step: Gives the rows their newest tokens, long ``(b,)``, and returns the next ones.
            replayed: Updates the host's counters of a step, except for those of the model.
            steps: The `GraphedSteps` that it advances.
            tokens: The newest ones.
        """
        if self._of is None or self._of[0] is not steps or self._of[1] != steps.allocations:
            self._of, self._plain, self._graph = (steps, steps.allocations), 0, None
        if self._graph is not None and steps.capacity_left:
            replayed()
            steps.replayed()
            return self._replay(tokens, steps.own_length)
        if steps.capacity_left < _WARMUP_STEPS or self._plain < _WARMUP_STEPS - 1:
            self._plain += 1
            return step(tokens)
        if self._plain == _WARMUP_STEPS - 1:
            self._plain += 1
            return self._beside(step, tokens)
        self._graph = _StepGraph(step, steps, tokens, self._device)  # which the host has counted
        return self._replay(tokens, steps.own_length)

    def _replay(self, tokens: Tensor, length: int) -> Tensor:
        assert self._graph is not None
        self.replays += 1
        return self._graph.replay(tokens, length)

    def _beside(self, step: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        """Take a step on the stream of the capture."""
        here, there = torch.cuda.current_stream(self._device), _capture_stream(self._device)
        there.wait_stream(here)
        with torch.cuda.stream(there):
            drawn = step(tokens)
        here.wait_stream(there)
        return drawn


class _StepGraph:
    """A captured step, not executed yet."""

    def __init__(
        self, step: Callable[[Tensor], Tensor], steps: GraphedSteps, tokens: Tensor, device: torch.device
    ) -> None:
        self._tokens = tokens.clone()
        self._column = torch.full((1,), steps.own_length, dtype=torch.long, device=device)
        self._at = steps.own_length
        self._graph = torch.cuda.CUDAGraph()

        def captured() -> None:
            self._tokens.copy_(step(self._tokens))

        # The outer stream, as a capture that fails leaves its own the current one. Other threads may go on meanwhile:
        # rewards are computed while there is decoding.
        beside = torch.cuda.graph(self._graph, stream=_capture_stream(device), capture_error_mode="thread_local")
        try:
            with torch.cuda.stream(torch.cuda.current_stream(device)), beside:
                steps.capture(captured, self._column)
        except Exception as error:  # at its end all that CUDA says is that something went wrong before
            raise error.__context__ or error from None

    def replay(self, tokens: Tensor, length: int) -> Tensor:
        """Return the next tokens. ``length``: columns of the rows' own tokens after this step."""
        if tokens is not self._tokens:  # others were launched in between
            self._tokens.copy_(tokens)
        if self._at != length - 1:
            self._column.fill_(length - 1)
        self._at = length
        self._graph.replay()
        return self._tokens


@functools.cache
def _capture_stream(device: torch.device) -> Any:
    """Return the one stream of captures: cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream(device)


_GRAPH_TRIAL = EquivalenceTrial(
    "generator.speedups.cuda_graphs", "The host launches each operation of its decode steps", most=1e-3
)
"""The same kernels on the same shapes: the logits of the two ways are equal."""

_PROOF_STEPS = 8
"""Steps of a proof: one to allocate the buffer, those that are launched before a capture, and three replays."""


def step_graphs_proven(policy: nn.Module, *, lean: bool) -> bool:
    """Decode a few tokens of two prompts both ways, and compare. Call it in evaluation mode, without gradient.

    ``lean``: True where it takes lean steps.
    """
    return _GRAPH_TRIAL.passes(policy, lambda: _decode_graphed_and_launched(policy, lean))


def _decode_graphed_and_launched(policy: nn.Module, lean: bool) -> tuple[Tensor, Tensor]:
    batch = probe_batch(policy)
    if not lean:
        raise Unfit("it takes no lean steps")
    if batch.keys.device.type != "cuda":
        raise Unfit(f"CUDA graphs are of CUDA devices, and it is on {batch.keys.device.type}")
    capacity = _PROOF_STEPS + _WARMUP_STEPS
    model = LeanModel(policy, batch.prompt_ids.shape[1] + capacity)
    graphs = StepGraphs(batch.keys.device)
    launched, replayed = (
        _decode_steps(GraphedSteps(model, policy, batch, capacity), batch, way) for way in (None, graphs)
    )
    assert graphs.replays > 1, graphs.replays  # the first takes the very numbers of the capture
    return replayed, launched


def _decode_steps(steps: GraphedSteps, batch: DecodeBatch, graphs: StepGraphs | None) -> Tensor:
    """Return logits ``(s, 4, v)`` of a few steps, each with tokens that depend on those before."""
    tokens, size, logits = batch.keys + 1, steps.logits.shape[-1], []

    def step(tokens: Tensor) -> Tensor:
        steps.advance(tokens)
        return (tokens * 5 + 3) % size

    for _ in range(_PROOF_STEPS):
        tokens = step(tokens) if graphs is None else graphs(step, lambda: None, steps, tokens)
        logits.append(steps.logits.clone())
    return torch.stack(logits)
