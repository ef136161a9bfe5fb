"""The sizes of a language model that its memory is made of, from its config: no weight is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_rl.models.policy.lora import asks_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Linear:
    """Linear layers of one size."""

    inputs: int
    outputs: int
    paths: tuple[str, ...]
    """Their names in the model."""

    @property
    def count(self) -> int:
        """Number of them."""
        return len(self.paths)

    def only(self, kept: Callable[[str], bool]) -> Linear:
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
    linears: tuple[Linear, ...]
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

    def adapted(self, targets: str | list[str]) -> tuple[Linear, ...]:
        """Return the linear layers that get an adapter: all for "all-linear", or those that `asks_for` finds."""
        if targets == "all-linear":
            return self.linears
        asked = (linear.only(lambda path: asks_for(targets, path)) for linear in self.linears)
        return tuple(linear for linear in asked if linear.paths)


class _Counted(NamedTuple):
    """Facts that are counted on a model without storage."""

    parameters: int
    linears: tuple[Linear, ...]
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

    from lit_rl.models.policy.loading import auto_class, drops_out
    from lit_rl.models.policy.shared_prefix import can_share

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
    linears = tuple(Linear(*size, paths=tuple(paths)) for size, paths in sorted(found.items()))
    parameters = sum(p.numel() for p in model.parameters())
    recomputes = model.supports_gradient_checkpointing
    return _Counted(parameters, linears, recomputes, can_share(model.eval()), drops_out(model))
