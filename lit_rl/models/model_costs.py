"""The costs of a language model: the sizes that its memory is made of, and the floating-point operations of its passes.

Sizes come from the config: no weight is read. Operations are counted from matrix products. A product of an ``(n, i)``
and an ``(i, o)`` matrix takes ``2 n i o`` operations; nothing else is counted (norms, activations, softmax, sampling,
the optimizer). Of a pass that computes spans of texts:

    forward   = 2 N tokens + 2 N_head scored + 2 L h (d_qk + d_v) pairs
    backward  = one product as large for each gradient that is needed: of a weight that is trained, and of an input
                behind which something is trained; of attention twice its forward pass

``N`` are the weights of linear layers that a token is multiplied by: of a mixture those of the experts that it goes
to, and its router; no embedding. ``pairs`` are those of a query and a key that the causal mask lets meet, ``s (s + 1)
/ 2`` for a text of ``s`` tokens, fewer in a layer with a sliding window. The head works on the ``scored`` positions
alone.

These are the operations that a model needs, once each. What gradient checkpointing, a fused head or flash attention
compute a second time is not counted, nor is padding. A prompt that runs once for several rows is one span.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_rl.models.adapters import targets_match

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class LinearLayers:
    """Linear layers of one size."""

    inputs: int
    outputs: int
    paths: tuple[str, ...]
    """Their names in the model."""

    @property
    def count(self) -> int:
        """Number of them."""
        return len(self.paths)

    def only(self, kept: Callable[[str], bool]) -> LinearLayers:
        """Return the layers whose path is kept."""
        return replace(self, paths=tuple(path for path in self.paths if kept(path)))


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers. Parameters are counted on a model without storage, so they are exact."""

    parameters: int
    """Number of parameters, tied ones once."""
    layers: int
    hidden: int
    heads: int
    query_width: int
    """Heads times their width."""
    kv_width: int
    """Heads of keys times their width."""
    inner: int
    """Width of a token's MLP; of a mixture, of the experts that it goes to."""
    vocabulary: int
    linears: tuple[LinearLayers, ...]
    """Linear layers, the head left out."""
    tied: bool
    """True where the head's weight is the embedding's."""
    recomputes: bool
    """True where transformers supports gradient checkpointing of this model."""
    shares: bool
    """True where the prompt of a group may run once: its cache of keys and values gives the same numbers."""
    drops_out: bool
    """True where its config has a probability of dropout above 0."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelShape:
        """Return the shape of a config of transformers. Fields that it lacks are those of a plain transformer."""
        text: Any = config.get_text_config()
        hidden, heads = text.hidden_size, text.num_attention_heads
        width = getattr(text, "head_dim", None) or hidden // heads
        experts = getattr(text, "num_experts_per_tok", None)
        inner = getattr(text, "moe_intermediate_size", None) if experts else None
        plain = getattr(text, "intermediate_size", None) or 4 * hidden
        counted = _counted(type(config), config.to_json_string(use_diff=False))
        return cls(
            parameters=counted.parameters,
            layers=text.num_hidden_layers,
            hidden=hidden,
            heads=heads,
            query_width=heads * width,
            kv_width=(getattr(text, "num_key_value_heads", None) or heads) * width,
            inner=(inner or plain) * (experts or 1),
            vocabulary=text.vocab_size,
            linears=counted.linears,
            tied=bool(getattr(text, "tie_word_embeddings", False)),
            recomputes=counted.recomputes,
            shares=counted.shares,
            drops_out=counted.drops_out,
        )

    @property
    def trunk(self) -> int:
        """Parameters without the language-model head."""
        return self.parameters - (0 if self.tied else self.head)

    @property
    def head(self) -> int:
        """Weights of the language-model head."""
        return self.vocabulary * self.hidden

    @property
    def multiplied(self) -> int:
        """Weights of linear layers, the head among them: a product in a narrow type reads a narrow copy of these."""
        return self.head + sum(linear.inputs * linear.outputs * linear.count for linear in self.linears)

    def adapted(self, targets: str | list[str]) -> tuple[LinearLayers, ...]:
        """Return the linear layers that get an adapter: all for "all-linear", or those that `targets_match` finds."""
        if targets == "all-linear":
            return self.linears
        matching = (linear.only(lambda path: targets_match(targets, path)) for linear in self.linears)
        return tuple(linear for linear in matching if linear.paths)


class _Counted(NamedTuple):
    """Facts that are counted on a model without storage."""

    parameters: int
    linears: tuple[LinearLayers, ...]
    recomputes: bool
    shares: bool
    drops_out: bool


@cache
def _counted(kind: type, text: str) -> _Counted:
    """Count on the model that a config describes, without storage."""
    import json

    import torch
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from lit_rl.models.loading import auto_class
    from lit_rl.models.modes import drops_out
    from lit_rl.models.shared_prefix import can_share

    config: Any = kind.from_dict(json.loads(text))  # type: ignore[attr-defined]
    with torch.device("meta"):
        model: Any = auto_class(config).from_config(config)
    model.tie_weights()
    head = model.get_output_embeddings()
    found: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for name, part in model.named_modules():
        if part is not head and isinstance(part, nn.Linear | Conv1D):
            inputs, outputs = part.weight.shape if isinstance(part, Conv1D) else part.weight.shape[::-1]
            found[(int(inputs), int(outputs))].append(name)
    linears = tuple(LinearLayers(*size, paths=tuple(paths)) for size, paths in sorted(found.items()))
    parameters = sum(p.numel() for p in model.parameters())
    recomputes = model.supports_gradient_checkpointing
    return _Counted(parameters, linears, recomputes, can_share(model.eval()), drops_out(model))


class Span(NamedTuple):
    """Neighbouring tokens of a text that a pass computes."""

    past: int
    """Tokens of the text before them, whose keys and values are there already."""
    new: int
    """Number of these tokens."""

    def pairs(self, window: int | None = None) -> int:
        """Return the number of pairs of a query and a key that a causal mask lets meet; a query meets ``window`` keys
        at most."""

        def until(tokens: int) -> int:
            inside = tokens if window is None else min(tokens, window)
            return inside * (inside + 1) // 2 + (tokens - inside) * inside

        return until(self.past + self.new) - until(self.past)


@dataclass(frozen=True)
class Cost:
    """Operations of a forward pass, and of the backward pass that follows it."""

    forward: int = 0
    backward: int = 0

    @property
    def training(self) -> int:
        """Operations of both passes together."""
        return self.forward + self.backward

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.forward * times, self.backward * times)


@dataclass(frozen=True)
class ModelFlops:
    """Costs of a model: of each token, of each scored position, of each pair of tokens that meet."""

    token: Cost
    """Cost of a token that runs through the layers."""
    scored: Cost
    """Cost of a position that the head works on."""
    pair: Mapping[int | None, Cost]
    """Cost of a pair of a query and a key, by the window of the layers (None: no window)."""

    def of(self, spans: Iterable[Span], scored: int) -> Cost:
        """Return the cost of passes over these spans.

        Args:
            spans: What is computed. The tokens of a decode are spans of one token, or one span: the sum is the same.
            scored: Positions that the head works on.
        """
        spans = list(spans)
        total = self.token * sum(span.new for span in spans) + self.scored * scored
        for window, cost in self.pair.items():
            total += cost * sum(span.pairs(window) for span in spans)
        return total

    @classmethod
    def of_model(cls, model: nn.Module) -> ModelFlops:
        """Return the costs of a loaded causal model, or of a trunk alone; its trained weights decide the backward pass.

        Of a model over images the text part is counted; of linear attention and state spaces the linear layers are. In
        the lowest decoder layer with a trained weight the backward pass may be overstated: where attention and MLP
        stand side by side, or where queries, keys and values are not all trained.
        """
        from lit_rl.models.trunk import base_of

        base = base_of(model)
        decoder, head = base.get_decoder(), getattr(base, "get_output_embeddings", lambda: None)()
        layers = _Layers(decoder, base.config)
        trains = any(weight.requires_grad for weight in model.parameters())
        of_head = Cost()
        for linear in _linears(head, base.config) if head is not None else ():
            of_head += _product(linear.size, trained=linear.trained, carries=trains)
        return cls(layers.token(), of_head, layers.pair(base.config.get_text_config()))


def _product(size: int, *, trained: bool, carries: bool) -> Cost:
    """Return the cost of a row of input for a weight of ``size`` numbers; `carries` where the row needs a gradient."""
    return Cost(2 * size, 2 * size * (trained + carries))


def _multiplied(part: Any) -> int:
    """Return the number of weights that a row is multiplied by in a linear layer; 0 of any other module."""
    if _wraps(part):  # its parts are modules themselves
        return 0
    if hasattr(part, "nx") and hasattr(part, "nf"):  # GPT-2's Conv1D
        return part.nx * part.nf
    size = getattr(part, "in_features", 0) * getattr(part, "out_features", 0)
    return size if isinstance(size, int) else 0


def _wraps(part: Any) -> bool:
    """Tell whether a module is a layer of the plain model with adapters of PEFT, or with a layer in its place."""
    return hasattr(part, "base_layer") or hasattr(part, "original_module")


class _Linear(NamedTuple):
    """A linear layer, or the matrices of an expert, in a decoder."""

    path: str
    size: int
    trained: bool

    @property
    def layer(self) -> int:
        return _layer_of(self.path)

    @property
    def owner(self) -> str:
        """The layer of the plain model that it belongs to, adapters being parts of theirs."""
        return re.split(r"\.(?:base_layer|lora_\w+|modules_to_save)(?:\.|$)", self.path)[0]


def _layer_of(path: str) -> int:
    """Return the number of the decoder layer that something stands in; -1 outside of them."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(found[1]) if found else -1


class _Layers:
    """The linear layers of a decoder, in the order in which they are computed, and where gradients end."""

    def __init__(self, decoder: nn.Module, config: Any) -> None:
        self.linears = list(_linears(decoder, config))
        products = {f"{linear.path}.weight" for linear in self.linears}
        products |= {linear.path for linear in self.linears}
        places = {name: (_layer_of(name), weight) for name, weight in decoder.named_parameters()}
        numbers = [number for number, _ in places.values()]
        above = max(numbers, default=-1) + 1
        behind = next((i for i, number in enumerate(numbers) if number >= 0), 0)  # embeddings stand before the layers
        trained = {
            name: above if number < 0 and place > behind else number
            for place, (name, (number, weight)) in enumerate(places.items())
            if weight.requires_grad
        }
        self.first = min(trained.values(), default=None)
        """The lowest decoder layer with a trained weight; -1 where one stands below them all; None without any."""
        self.opens = any(number == self.first and name not in products for name, number in trained.items())
        """True where that layer trains something beside its linear layers, such as a norm before them."""

    def token(self) -> Cost:
        """Return the cost of a token."""
        total, groups = Cost(), defaultdict(list)
        for linear in self.linears:
            if linear.layer != self.first or linear.layer < 0:
                carries = self.first is not None and (linear.layer > self.first or linear.layer < 0)
                total += _product(linear.size, trained=linear.trained, carries=carries)
            else:
                groups[linear.owner.rpartition(".")[0]].append(linear)
        carries = self.opens
        for group in groups.values():
            last = group[-1].owner
            for stage in ([x for x in group if x.owner != last], [x for x in group if x.owner == last]):
                for linear in stage:
                    inner = linear.trained and ".lora_B." in linear.path  # its input is what lora_A made
                    total += _product(linear.size, trained=linear.trained, carries=carries or inner)
                carries = carries or any(linear.trained for linear in stage)
        return total

    def pair(self, config: Any) -> dict[int | None, Cost]:
        """Return the cost of a pair of a query and a key, by window; none of a state space, which has no pairs."""
        heads = getattr(config, "num_attention_heads", None)
        if not isinstance(heads, int):
            return {}
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        of_queries = getattr(config, "qk_head_dim", None) or width
        of_values = getattr(config, "v_head_dim", None) or width
        once = 2 * heads * (of_queries + of_values)
        found: dict[int | None, Cost] = {}
        for number, window in enumerate(_windows(config)):
            if window != 0:
                backward = 2 * once * self._reaches_attention(number)
                found[window] = found.get(window, Cost()) + Cost(once, backward)
        return found

    def _reaches_attention(self, number: int) -> bool:
        """Tell whether queries, keys or values of a layer need a gradient."""
        if self.first is None or number != self.first:
            return self.first is not None and number > self.first
        read = [x for x in self.linears if x.layer == number and "att" in x.owner]
        return self.opens or any(x.trained for x in read if x.owner != read[-1].owner)


def _windows(config: Any) -> list[int | None]:
    """Return, for each layer, the number of keys that a query meets at most: None for all, 0 without softmax
    attention."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    chunk = getattr(config, "attention_chunk_size", None)
    sizes = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk, "attention": None}
    default = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    return [sizes.get(kind, 0) for kind in kinds]


def _linears(module: nn.Module, config: Any) -> Iterable[_Linear]:
    """Yield the linear layers that a row runs through in a module; of experts as large a part as it goes to."""
    config = config.get_text_config()
    named = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((count for name in named if (count := getattr(config, name, None))), 0)
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    active: dict[str, Sequence[str]] = {}
    part: Any
    for path, part in module.named_modules():
        if _wraps(part):
            active[path] = part.active_adapters
        kind, _, adapter = path.rpartition(".")
        wrapper, _, kind = kind.rpartition(".")
        adapts = kind == "modules_to_save" or kind.startswith("lora_")
        if path.endswith("original_module") or (adapts and adapter not in active.get(wrapper, ())):
            continue
        share = (chosen, experts) if re.search(r"experts\.\d+(\.|$)", path) and experts else (1, 1)
        if size := _multiplied(part):
            weight = getattr(part, "weight", None)
            yield _Linear(path, size * share[0] // share[1], weight is not None and weight.requires_grad)
            continue
        for key, weight in part.named_parameters(recurse=False):
            if experts and weight.ndim in (2, 3) and weight.shape[0] == experts and not key.endswith("bias"):
                # Matrices of all experts in one, or of their router, which chooses among them.
                size = weight.numel() * chosen // experts if weight.ndim == 3 else weight.numel()
                yield _Linear(f"{path}.{key}", size, weight.requires_grad)
