"""A forward pass that ends in log-probs instead of logits: the head of a model is fused with the softmax behind it.

The head's own `forward` is replaced for the length of one call, so hooks on the head or on the model (that gather
sharded weights, fetch offloaded ones, or record) work as with logits. Models that change logits after the head (a
soft cap, a scale) are found by a trial, and keep their logits whole.

Embedding and head add their gradients to one sum (`lit_rl.ops.fused_head`), over all calls of the model in a
micro-batch. A pass opens the sums, the calls inside it use them: lookups by a replaced `forward` of the embedding,
the head by `summed_weight` where it is fused with the softmax. A head that is the embedding shares its sum with it.
Any other use of the weight gets a gradient from autograd, as always.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lit_rl.core.transfers import to_device
from lit_rl.models.forward_inputs import Bucket, join_buckets
from lit_rl.models.kernels import compiler_of
from lit_rl.models.language_model import ForwardOptions
from lit_rl.models.loading import BanningHead, Float32Head
from lit_rl.models.modes import evaluation_mode
from lit_rl.models.sharding import has_partitions
from lit_rl.models.trunk import base_of
from lit_rl.ops.fused_head import Distribution, SummedWeight, linear_logprobs
from lit_rl.ops.logprobs import TokenStats, token_stats
from lit_rl.ops.sampling_distribution import History

_OPEN: dict[int, SummedWeight] = {}
"""Sums of the passes that are running, by the weight's `id`."""

_LINEAR_HEADS = (nn.Linear, Float32Head, BanningHead)


@contextmanager
def fused_accumulation(model: nn.Module, options: ForwardOptions) -> Iterator[None]:
    """Let calls of the model with a gradient add those of the embedding and of the head to one sum each, inside.

    On CPUs (other devices are not measured); not of weights that are sharded, frozen, or wrapped by an adapter.

    Args:
        model: A causal language model, perhaps under PEFT.
        options: Whether to do so at all.
    """
    base = base_of(model)
    embedding: Any = getattr(base, "get_input_embeddings", lambda: None)()
    head: Any = getattr(base, "get_output_embeddings", lambda: None)()
    with ExitStack() as opened:
        if options.fused_accumulation and torch.is_grad_enabled():
            for layer in (embedding, head):
                if type(layer) not in (nn.Embedding, *_LINEAR_HEADS):
                    continue
                weight = layer.weight
                whole = weight.is_leaf and weight.dim() == 2 and not isinstance(weight, DTensor)
                if whole and weight.requires_grad and weight.device.type == "cpu" and id(weight) not in _OPEN:
                    _OPEN[id(weight)] = SummedWeight.of(weight)
                    opened.callback(_OPEN.pop, id(weight))
            looks_up_rows = (
                type(embedding) is nn.Embedding
                and "forward" not in vars(embedding)
                and embedding.max_norm is None
                and not (embedding.scale_grad_by_freq or embedding.sparse)
            )
            if looks_up_rows and (summed := summed_weight(embedding.weight)):
                opened.enter_context(replaced_forward(embedding, lambda ids: summed.lookup(ids, embedding.padding_idx)))
        yield


def summed_weight(weight: Tensor) -> SummedWeight | None:
    """Return the sum for this weight's gradient, where a pass has opened one."""
    return _OPEN.get(id(weight))


@contextmanager
def replaced_forward(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the forward of this one module, inside the context; hooks on it still run."""
    before = vars(layer).get("forward")  # that of a library which wraps modules; else it is the class's
    layer.forward = forward
    try:
        yield
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before


@dataclass(frozen=True)
class Targets:
    """The tokens that a pass scores."""

    ids: Tensor
    """Long ``(b, t)``."""
    wanted: Tensor
    """Bool ``(b, t)``: the others cost nothing. The host reads it: best given in its memory."""
    first: int = 0
    """The column of the head's input that predicts the first column of ``ids``; negative counts from the end."""
    rows: Tensor | None = None
    """Long ``(b,)``: the row of the pass that predicts each row of ``ids``. None: its own."""
    history: History | None = None
    """Earlier tokens, which change the logits of the ``(b, t)``. None: no change."""
    further_ids: Tensor | None = None
    """Long ``(b, t, k)``: further tokens at each position, which are scored too. None: none."""

    def columns_of(self, passed: Tensor) -> Tensor:
        """Return the ``(b, t, ...)`` that predict the tokens, of the ``(rows, columns, ...)`` that a pass computed."""
        start = self.first % passed.shape[1]
        found = passed[:, start : start + self.ids.shape[1]]
        return found if self.rows is None else found.index_select(0, self.rows)


@dataclass(frozen=True)
class TargetScores:
    """Scores of the targets by a pass, ``(b, t)`` each. Numbers without meaning where none was wanted."""

    logprobs: Tensor
    """Float32 (float64 of float64 weights), with gradient."""
    entropy: Tensor | None
    """The entropy, of the same type. None unless requested."""
    stats: TokenStats | None
    """Statistics of the logits. None unless requested."""
    further: Tensor | None = None
    """``(b, t, k)``: log-probs of the further tokens, of the same type, with gradient. None without them."""

    def mapped(self, change: Callable[[Tensor], Tensor]) -> TargetScores:
        """Return the scores in another shape."""
        entropy = None if self.entropy is None else change(self.entropy)
        stats = {name: change(getattr(self.stats, name)) for name in _STATS if self.stats}
        further = None if self.further is None else change(self.further)
        return TargetScores(change(self.logprobs), entropy, TokenStats(**stats) if stats else None, further)

    def beside(self, later: TargetScores) -> TargetScores:
        """Return these columns, and those of later tokens of the same rows."""
        entropy = [part.entropy for part in (self, later) if part.entropy is not None]
        both = [part.stats for part in (self, later) if part.stats is not None]
        stats = {name: torch.cat([getattr(each, name) for each in both], 1) for name in _STATS if both}
        further = [part.further for part in (self, later) if part.further is not None]
        return TargetScores(
            torch.cat([self.logprobs, later.logprobs], 1),
            torch.cat(entropy, 1) if entropy else None,
            TokenStats(**stats) if stats else None,
            torch.cat(further, 1) if further else None,
        )

    @staticmethod
    def of_buckets(parts: Sequence[TargetScores], buckets: Sequence[Bucket], width: int) -> TargetScores:
        """Return ``(b, width)``: the scores of each bucket, in the order of the rows."""

        def joint(values: Sequence[Tensor | None]) -> Tensor | None:
            known = [value for value in values if value is not None]
            return join_buckets(known, buckets, width) if known else None

        logprobs = joint([part.logprobs for part in parts])
        assert logprobs is not None
        found = [part.stats for part in parts if part.stats is not None]
        stats = {
            name: join_buckets([getattr(each, name) for each in found], buckets, width) for name in _STATS if found
        }
        return TargetScores(
            logprobs,
            joint([part.entropy for part in parts]),
            TokenStats(**stats) if stats else None,
            joint([part.further for part in parts]),
        )


def score_targets(
    model: nn.Module, targets: Targets, distribution: Distribution, *, fused: bool, **inputs: Any
) -> tuple[TargetScores, Any]:
    """Run one forward pass; return the scores of the targets, and the model's own output.

    Args:
        model: A causal language model; under PEFT with the adapter that is active.
        targets: Tokens that are predicted by the columns that the head computes (`logits_to_keep` of the inputs).
        distribution: Distribution of the scores, and the statistics to compute.
        fused: Whether to fuse the head, where it can be: the same numbers, without the logits in memory.
        inputs: Keyword arguments of the model.
    """
    head = linear_head(model) if fused else None
    if head is None or not _returns_head_output(model, head):
        output = model(**inputs)
        logits = targets.columns_of(output.logits)
        logprobs, entropy = distribution.score_tokens(logits, targets.ids, targets.history)
        stats = None
        if distribution.stats:
            stats = token_stats(logits.detach(), targets.ids, temperature=distribution.temperature)
        further = None if targets.further_ids is None else distribution.score_further(logits, targets.further_ids)
        return TargetScores(logprobs, entropy, stats, further), output
    with replaced_forward(
        head, lambda hidden: _stacked_scores(targets.columns_of(hidden), head, targets, distribution)
    ):
        output = model(**inputs)
    passed, further = output.logits, None
    if targets.further_ids is not None:
        passed, further = passed.tensor_split([passed.shape[-1] - targets.further_ids.shape[-1]], -1)
    logprobs, *others = passed.unbind(-1)
    entropy = others.pop(0) if distribution.entropy else None
    if entropy is not None and not distribution.entropy_gradient:
        entropy = entropy.detach()
    if not distribution.stats:
        return TargetScores(logprobs, entropy, None, further), output
    log_sum_sq, correct, mean_logit = (part.detach() for part in others)
    return TargetScores(logprobs, entropy, TokenStats(log_sum_sq, correct.bool(), mean_logit)), output


def has_separable_head(model: nn.Module) -> bool:
    """Tell whether the logits of a model are its head alone applied to its last hidden states, at any time.

    The weights of a sharded head are whole only while the model runs.
    """
    if not isinstance(model, nn.Module) or isinstance(model, FSDPModule) or has_partitions(model):
        return False
    head = linear_head(model)
    return head is not None and _returns_head_output(model, head)


@contextmanager
def without_head(model: nn.Module) -> Iterator[None]:
    """Let a model that `has_separable_head` return the input of its head in place of logits, inside the context."""
    head = linear_head(model)
    assert head is not None
    with replaced_forward(head, lambda hidden: hidden):
        yield


def linear_head(model: nn.Module) -> nn.Linear | None:
    """Return the head of a model. None where it is no plain linear map: with an adapter on it, or quantised."""
    head = getattr(base_of(model), "get_output_embeddings", lambda: None)()
    return head if type(head) in _LINEAR_HEADS else None


def factors(hidden: Tensor, head: nn.Linear) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, weight and bias in the type in which the head itself would multiply them."""
    kind, dtype = hidden.device.type, head.weight.dtype
    if isinstance(head, Float32Head) or (isinstance(head, BanningHead) and head.exact):
        dtype = torch.float32
    elif torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    bias = head.bias_with_bans if isinstance(head, BanningHead) else head.bias
    return hidden.to(dtype), head.weight.to(dtype), None if bias is None else bias.to(dtype)


_RETURNS_HEAD_OUTPUT: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _returns_head_output(model: nn.Module, head: nn.Linear) -> bool:
    """Tell whether nothing is done to logits after the head: tried once a model, by two tokens without gradient."""
    if model not in _RETURNS_HEAD_OUTPUT:
        device = head.weight.device
        numbers = torch.tensor([[[7.0], [-77.0]]], device=device)
        with torch.no_grad(), evaluation_mode(model), replaced_forward(head, lambda hidden: numbers):
            returned = model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), use_cache=False).logits
        _RETURNS_HEAD_OUTPUT[model] = returned.shape == numbers.shape and torch.equal(returned.float(), numbers)
    return _RETURNS_HEAD_OUTPUT[model]


_STATS = tuple(field.name for field in fields(TokenStats))


def _stacked_scores(hidden: Tensor, head: nn.Linear, targets: Targets, distribution: Distribution) -> Tensor:
    """Return ``(b, t, k)``: the k scores of the targets in one tensor, as a head returns one; further tokens last."""
    at = to_device(targets.wanted.flatten().nonzero().flatten(), hidden.device)
    rows, weight, bias = factors(hidden.flatten(0, 1).index_select(0, at), head)
    summed = summed_weight(head.weight)
    with torch.autocast(hidden.device.type, enabled=False):
        found = linear_logprobs(
            rows,
            weight.detach() if summed else weight,
            targets.ids.flatten()[at],
            distribution,
            bias=bias,
            history=targets.history and targets.history.mapped(lambda field: field.flatten()[at]),
            summed=summed,
            compiler=compiler_of(head) if torch.is_grad_enabled() else None,
            further_ids=None if targets.further_ids is None else targets.further_ids.flatten(0, 1)[at],
        )
    stats = [getattr(found.stats, name) for name in _STATS] if found.stats else []
    parts = [part for part in (found.logprobs, found.entropy, *stats) if part is not None]
    size, dtype = targets.ids.numel(), found.logprobs.dtype
    spread = [part.new_zeros(size).index_copy(0, at, part).view(targets.ids.shape).to(dtype) for part in parts]
    if found.further is None:
        return torch.stack(spread, -1)
    further = found.further.new_zeros(size, found.further.shape[1]).index_copy(0, at, found.further).to(dtype)
    return torch.cat([torch.stack(spread, -1), further.view(*targets.ids.shape, -1)], -1)
