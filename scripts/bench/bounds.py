"""What a step cannot be faster than on a machine with these limits: arithmetic only.

N backbone and head parameters, L layers, h query heads of width d, kappa bytes of keys and values a token, b_w bytes a
weight, F FLOP/s, beta bytes/s; n prompts of P tokens, completions of lengths T_i:

    prefill     2 N_b n P / F
    decode      sum_t max(bytes_t / beta, flops_t / F), over the rows that are not over at token t
                bytes_t = b_w N + kappa (n P + sum t)           the keys of a prompt read once for its group
                flops_t = 2 N rows_t + 4 L h d sum (P + t)
    train       (6 N_b T_tok + 6 N_e T_comp + 3 A) / F          T_tok = n P + sum T_i
                A = 4 L h d (pairs of prompts, and of completions with what stands before them)
    optimizer   30 N / beta                                     AdamW in float32, bfloat16 weights written
    reference   a third of `train`, where a loss reads one

The FLOPs are those of `lit_rl.models.model_costs`, of which a run's `mfu` is made too. Useful FLOPs here, of which the
benchmark's model FLOPs utilisation is made, count each row with its own prompt, T_tok = sum (P + T_i), as contenders
differ in whether they share it. So sharing a prompt may push it over what the hardware executes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.workload import SHAPES, Workload
from lit_rl.models.model_costs import Cost, ModelFlops, Span

WEIGHT_BYTES = 2
"""Of a weight and of a key or value in the bound: bfloat16, whatever a contender uses."""


@dataclass(frozen=True)
class Dims:
    """The sizes of a model that the bound is made of."""

    backbone: int
    """Parameters without the language-model head."""
    head: int
    """Parameters of the head; tied, so they are the embedding's."""
    layers: int
    query_width: int
    """h d."""
    kv_width: int
    """Heads of keys times their width."""

    @classmethod
    def of(cls, shape: str) -> Dims:
        """Of a shape of `workload`: Qwen2, with biases on queries, keys and values."""
        c: dict[str, Any] = SHAPES[shape]
        hidden, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
        kv = hidden // c["num_attention_heads"] * c["num_key_value_heads"]
        attention = 2 * hidden * hidden + 2 * hidden * kv + hidden + 2 * kv
        layer = attention + 3 * hidden * inner + 2 * hidden
        return cls(layers * layer + hidden, c["vocab_size"] * hidden, layers, hidden, kv)

    @property
    def total(self) -> int:
        return self.backbone + self.head

    @property
    def flops(self) -> ModelFlops:
        """The costs where every weight is trained."""
        pair = 4 * self.layers * self.query_width
        token, scored = (Cost(2 * weights, 4 * weights) for weights in (self.backbone, self.head))
        return ModelFlops(token, scored, {None: Cost(pair, 2 * pair)})

    @property
    def kv_bytes(self) -> int:
        """Of keys and values of a token, in bfloat16."""
        return 2 * self.layers * self.kv_width * WEIGHT_BYTES


def decode_bytes(dims: Dims, prompts: int, prompt_tokens: int, lengths: Sequence[int]) -> list[float]:
    """Bytes that are read at each token, the keys of a prompt once."""
    return [
        WEIGHT_BYTES * dims.total + dims.kv_bytes * (prompts * prompt_tokens + t * sum(x >= t for x in lengths))
        for t in range(1, max(lengths) + 1)
    ]


def decode_flops(dims: Dims, prompt_tokens: int, lengths: Sequence[int]) -> list[int]:
    """FLOPs of each token."""
    alive = [sum(x >= t for x in lengths) for t in range(1, max(lengths) + 1)]
    return [
        dims.flops.of([Span(prompt_tokens + t - 1, 1)] * rows, rows).forward for t, rows in enumerate(alive, start=1)
    ]


def train_flops(dims: Dims, prompts: int, prompt_tokens: int, lengths: Sequence[int], *, shared: bool) -> int:
    """FLOPs of forward and backward.

    Args:
        dims: The model's.
        prompts: How many, where they are shared.
        prompt_tokens: Of each.
        lengths: Of the completions.
        shared: Whether a prompt is computed once for its group.
    """
    copies = prompts if shared else len(lengths)
    spans = [Span(0, prompt_tokens)] * copies + [Span(prompt_tokens, x) for x in lengths]
    return dims.flops.of(spans, sum(lengths)).training


@dataclass(frozen=True)
class Bound:
    """Least seconds of a step, by part."""

    prefill: float
    decode: float
    train: float
    reference: float
    optimizer: float

    @property
    def step(self) -> float:
        return self.prefill + self.decode + self.train + self.reference + self.optimizer


@dataclass(frozen=True)
class Work:
    """What a rollout of a workload asks for."""

    dims: Dims
    prompts: int
    prompt_tokens: int
    lengths: Sequence[int]
    live: Sequence[int]
    """Lengths of the completions that teach something."""
    live_prompts: int
    generates: bool
    reads_reference: bool

    @classmethod
    def of(cls, workload: Workload, rollout: int) -> Work:
        lengths = workload.lengths_of(rollout)
        live = [length for row, length in enumerate(lengths) if not workload.is_dead(row)]
        return cls(
            Dims.of(workload.shape),
            workload.prompts,
            workload.prompt_tokens,
            lengths,
            live,
            len(live) // workload.group,
            workload.generates,
            workload.method == "dpo",
        )

    @property
    def train_flops(self) -> float:
        """The least that the training has to execute."""
        return train_flops(self.dims, self.live_prompts, self.prompt_tokens, self.live, shared=True)

    @property
    def useful_flops(self) -> float:
        """What MFU counts: every row with its own prompt, dead groups too."""
        return train_flops(self.dims, self.prompts, self.prompt_tokens, self.lengths, shared=False)

    @property
    def decode_bytes(self) -> float:
        return sum(decode_bytes(self.dims, self.prompts, self.prompt_tokens, self.lengths)) if self.generates else 0.0

    def bound(self, flops: float, bytes_: float) -> Bound:
        """On a machine with these rates a second."""
        decode, prefill = 0.0, 0.0
        if self.generates:
            read = decode_bytes(self.dims, self.prompts, self.prompt_tokens, self.lengths)
            computed = decode_flops(self.dims, self.prompt_tokens, self.lengths)
            decode = sum(max(a / bytes_, b / flops) for a, b in zip(read, computed))
            prefill = 2 * self.dims.backbone * self.prompts * self.prompt_tokens / flops
        train = self.train_flops / flops
        reference = train / 3 if self.reads_reference else 0.0
        return Bound(prefill, decode, train, reference, 30 * self.dims.total / bytes_)
