"""What `lit-rl doctor` found, and what follows from it: the types, the correction, the memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lit_rl.generation.base import Gap
from lit_rl.generation.vllm.probe import LIMITS
from lit_rl.models.policy.trunk import base_of
from lit_rl.rollout import Sampling

_GIB = 2**30
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_OVERHEAD, _MOST = 1.1, 0.9
"""Shares of a GPU: activations and graphs beside weights and cache; the largest share that is advised."""
_KEPT = 0.99
"""Share of responses whose ratio has to stay within bounds for a mask of whole responses to be harmless."""


@dataclass(frozen=True)
class Compared:
    """A generator's log-probs against the trainer's, over the tokens of completions. Differences are in nats."""

    responses: int
    tokens: int
    mean: float
    max: float
    k3: float
    beyond: float
    """Share of tokens that differ by more than 1e-2."""
    share: float
    """Effective share of the tokens under the weights of `token_truncate`."""
    within: float
    """Share of responses whose ratio, a product over their tokens, is in [1/3, 3]."""


@dataclass(frozen=True)
class Sides:
    """Types in which trainer and generator compute, and the generator's kind of device."""

    trainer: str
    generator: str
    generator_device: str

    @property
    def coarser(self) -> str:
        return max((self.trainer, self.generator), key=lambda kind: LIMITS[kind].mean if kind in LIMITS else 0.0)


@dataclass(frozen=True)
class Update:
    """Seconds of a sync, and the result of the generator's own probe, where it has one."""

    start: float
    sync: float
    probe: float | None
    gap: Gap | None


@dataclass(frozen=True)
class Planned:
    """The rollout that memory is planned for; tokens are the most that are allowed."""

    prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.group_size

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class Findings:
    """All findings."""

    sides: Sides
    exact: bool
    engine: bool
    """True if the generator has an engine with weights of its own."""
    unscored: tuple[str, ...]
    """Keys in force by which the generator draws and the training does not score."""
    compared: dict[str, Compared]
    """Comparisons by the type in which the trainer computes, its own first."""
    moved: float
    after: Compared
    """Comparison once the policy has moved by `moved` nats."""
    updates: tuple[Update, Update]
    tokens_per_second: float
    planned: Planned
    policy: nn.Module
    device: torch.device
    steps: str | None = None
    """Decoding of `native`: see `NativeGenerator.steps`. None for another generator."""
    shares_prompts: bool = False
    """True if training may compute the prompt of a group once."""


def scored(sampling: Sampling) -> Sampling:
    """Return the settings without those that the training does not score by."""
    return replace(sampling, **{name: getattr(Sampling(), name) for name in sampling.unscored})


def advice(found: Findings) -> Iterator[str]:
    """Yield settings, each with the measured number that leads to it."""
    if found.unscored:
        weighed = "validation alone may use it" if found.exact else "algo/correction weighs for it"
        yield (
            f"The generator draws by {', '.join(found.unscored)} and the training does not score by it, so "
            f"the difference is not the engine's alone; {weighed}. Completions after the move were drawn without."
        )
    if found.engine:
        yield _dtype(found)
    yield _correction(found)
    yield _memory(found)


def _dtype(found: Findings) -> str:
    ours, theirs = found.sides.trainer, found.sides.generator
    own = found.compared[ours]
    if _BYTES[theirs] < _BYTES[ours]:
        return (
            f"generator.dtype={ours}: the trainer computes in {ours} and the engine in {theirs}, so the mean "
            f"difference is {own.mean:.2g} nats, where {ours} on both sides has about 1e-5. Where memory is short, "
            f"{theirs} may stay: the effective share of the tokens is {own.share:.3f}."
        )
    if _BYTES[theirs] > _BYTES[ours]:
        return (
            f"generator.dtype={ours}: the trainer computes in {ours}, and the engine in {theirs} is no nearer to it "
            f"(mean difference {own.mean:.2g} nats) and takes twice the memory."
        )
    if theirs != ours:
        return f"generator.dtype={ours}: the engine computes in {theirs}, and the trainer in {ours} rounds otherwise."
    return f"generator.dtype={theirs} fits: mean difference {own.mean:.2g} nats, with the trainer in {ours}."


def _correction(found: Findings) -> str:
    own = found.compared[found.sides.trainer]
    if found.exact:
        own = found.after if found.unscored else own
        return (
            f"algo/correction=none (what auto takes): drawn by the policy itself, mean difference {own.mean:.2g} nats."
        )
    text = (
        f"algo/correction=token_truncate (what auto takes): the mean difference is {own.mean:.2g} nats, and its "
        f"weights leave an effective share of {own.share:.3f} of the tokens."
    )
    length = own.tokens / own.responses
    share = f"{own.within:.1%} of the responses, {length:.0f} tokens long on average, have a ratio in [1/3, 3]"
    if own.within >= _KEPT:
        return f"{text} algo/correction=sequence_mask would do no harm either: {share}; longer ones have wider ratios."
    return f"{text} Not sequence_mask: only {share}, and it takes the others out of the loss."


def _memory(found: Findings) -> str:
    planned, width = found.planned, _BYTES[found.sides.generator]
    weights = sum(weight.numel() for weight in found.policy.parameters()) * width / _GIB
    layers, heads, size = _attention(found.policy)
    sequence = 2 * layers * heads * size * width * planned.tokens / _GIB
    cache = sequence * planned.sequences
    formula = (
        f"keys and values take 2 x {layers} layers x {heads} heads x {size} x {width} bytes a token, x "
        f"{planned.prompts} prompts x {planned.group_size} completions x ({planned.prompt_tokens} + "
        f"{planned.new_tokens}) tokens = {cache:.3g} GiB at most"
    )
    if not found.engine:
        return f"generator.batch_size: {formula}. Where that is too much, N at a time take N x {sequence:.2g} GiB."
    if found.sides.generator_device == "cpu":
        fitting = max(1, math.ceil(cache))
        return f"generator.kv_cache_gib={fitting}: {formula}. With less, sequences wait for others to end."
    return _share(found.device, weights, cache, formula)


def _share(device: torch.device, weights: float, cache: float, formula: str) -> str:
    wanted = f"{formula}, and weights {weights:.3g} GiB"
    if device.type != "cuda":
        return f"generator.gpu_memory_utilization: {wanted}, x {_OVERHEAD}, over the memory of the server's GPU."
    total = torch.cuda.get_device_properties(device).total_memory / _GIB
    share = math.ceil(20 * _OVERHEAD * (weights + cache) / total) / 20
    text = f"{wanted}; ({weights:.3g} + {cache:.3g}) x {_OVERHEAD} / {total:.3g} GiB of the GPU = {share:.2f}"
    if share <= _MOST:
        return f"generator.gpu_memory_utilization={share:.2f}: {text}. The training needs the rest."
    return f"generator.gpu_memory_utilization={_MOST} at most: {text}. With less, sequences wait for others to end."


def _attention(policy: nn.Module) -> tuple[int, int, int]:
    """Return layers, heads of keys and values, and the size of a head, from the model's config."""
    config: Any = base_of(policy).config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, size
