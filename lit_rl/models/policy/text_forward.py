"""From texts to what a model thinks of each token that is learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lit_rl.errors import ConfigError
from lit_rl.examples import TokenBatch
from lit_rl.models.policy.device import device_of
from lit_rl.models.policy.forward import no_router
from lit_rl.models.policy.forward_names import forward_parameters
from lit_rl.models.policy.fused_accumulation import fused_accumulation
from lit_rl.models.policy.head import Targets, TargetScores, run
from lit_rl.models.policy.known_masks import known_masks
from lit_rl.models.policy.modes import evaluation_mode
from lit_rl.models.policy.options import DEFAULT, ForwardOptions
from lit_rl.models.policy.positions import text_inputs
from lit_rl.models.policy.rows_by_length import Call, at_most, by_length
from lit_rl.models.policy.trunk import base_of
from lit_rl.ops.linear_logprobs import Distribution
from lit_rl.ops.token_stats import TokenStats
from lit_rl.transfers import to_device


@dataclass(frozen=True)
class TextScores:
    """Scores of the tokens of texts by one forward pass. Column ``j`` is about token ``j + 1``, which it predicts.

    Columns where no row learns anything are 0.
    """

    logprobs: Tensor
    """Float32 ``(b, s - 1)``, with gradient."""
    entropy: Tensor | None = None
    """Float32 ``(b, s - 1)``, in nats, without gradient. None unless it was asked for."""
    stats: TokenStats | None = None
    """``(b, s - 1)`` each, without gradient. None unless they were asked for."""
    aux_loss: Tensor | None = None
    """0-dim, with gradient: the router's load-balancing loss. None unless it was asked for."""


def score_texts(
    model: nn.Module,
    tokens: TokenBatch,
    *,
    entropy: bool = False,
    stats: bool = False,
    router_aux: bool = False,
    options: ForwardOptions = DEFAULT,
) -> TextScores:
    """Score the learned tokens of texts under ``softmax(logits)``.

    The head works only on columns in which some row learns something. Texts that are packed into one row do not see
    each other: positions begin anew with each, and transformers builds the attention mask from that. Models in which
    that is not enough are found by `refuse_leaks`.

    Args:
        model: A causal language model; under PEFT with the adapter that is active.
        tokens: ``b`` rows.
        entropy: Whether to compute entropies.
        stats: Whether to compute `lit_rl.ops.token_stats.TokenStats`.
        router_aux: Whether to compute the load-balancing loss of a mixture of experts (2101.03961, eq. 4 to 6).
        options: How: whether the head is fused, rows of like length run together (those with several texts do not), and
            how many rows a call without gradient may have. A router's loss is over all rows, which are one call.

    Raises:
        ConfigError: the model has no router whose load could be balanced.
    """
    tokens = tokens.with_host()
    width, distribution = tokens.input_ids.shape[1] - 1, Distribution(entropy=entropy, stats=stats)
    calls = [] if router_aux or isinstance(model, FSDPModule) else _text_calls(tokens, options)
    with fused_accumulation(model, options):
        if len(calls) < 2:
            found, aux_loss = _one_text_call(model, tokens, distribution, router_aux, options)
        else:
            parts = [
                _one_text_call(model, tokens.take(call.rows, call.width), distribution, False, options)[0]
                for call in calls
            ]
            found, aux_loss = TargetScores.of_calls(parts, calls, width), None
    return TextScores(found.logprobs, found.entropy, found.stats, aux_loss)


def _text_calls(tokens: TokenBatch, options: ForwardOptions) -> list[Call]:
    """Return the rows of each call of the model, all of them together."""
    calls = [Call(torch.arange(len(tokens)), tokens.input_ids.shape[1])]
    if options.rows_by_length and tokens.segment is None:
        calls = by_length(tokens.on_host.attention_mask.sum(1), tokens.input_ids.device)
    return calls if options.most_rows is None or torch.is_grad_enabled() else at_most(calls, options.most_rows)


def _one_text_call(
    model: nn.Module, tokens: TokenBatch, distribution: Distribution, router_aux: bool, options: ForwardOptions
) -> tuple[TargetScores, Tensor | None]:
    """Return `(b, s - 1)` of every row in one call of the model, and the router's loss if requested."""
    host = tokens.on_host
    known = host.learned.any(0).nonzero().flatten()
    known = known if len(known) else torch.zeros(1, dtype=torch.long)
    columns = to_device(known, tokens.input_ids.device)
    inputs, shape = _inputs(model, tokens, columns, router_aux)
    ids, learned = tokens.input_ids[:, 1:][:, columns], host.learned[:, known]
    with known_masks(host.attention_mask) if tokens.segment is None else known_masks(positions=host.position_ids):
        found, output = run(
            model,
            Targets(ids.reshape(shape), learned.reshape(shape)),
            distribution,
            fused=options.fused_head,
            **inputs,
        )

    def spread(part: Tensor) -> Tensor:
        wide = part.new_zeros(len(tokens), tokens.input_ids.shape[1] - 1)
        return wide.index_copy(1, columns, part.reshape(ids.shape))

    return found.mapped(spread), _aux_loss(model, output, router_aux)


@torch.no_grad()
def refuse_leaks(model: nn.Module) -> None:
    """Refuse a model in which texts that share a row see each other, by two short forward passes.

    Where attention masks are not built from positions (linear attention, state spaces, convolutions, position biases
    of old models), a text goes on from the one before it, and nothing says so.

    Raises:
        ConfigError: the second text of a row changes with the first.
    """
    device = device_of(model)
    rows = base_of(model).config.get_text_config().vocab_size
    half = 8
    second = torch.arange(half, device=device) * 7 % rows
    firsts = [(torch.arange(half, device=device) * step + shift) % rows for step, shift in ((3, 1), (5, 2))]
    ids = torch.stack([torch.cat([first, second]) for first in firsts])
    segment = (torch.arange(2 * half, device=device) >= half).long().expand(ids.shape)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, : half + 1] = False
    felt = []
    try:
        with evaluation_mode(model):
            for texts in (segment, None):
                logprobs = score_texts(model, TokenBatch(ids, torch.ones_like(mask), mask, texts)).logprobs
                felt.append((logprobs[0] - logprobs[1]).abs().max().item())
    except TypeError as error:
        raise _leaks(model, f"takes no position_ids ({error})") from error
    # What is left of rounding in half precision is far below what a text feels of its own beginning.
    if not felt[0] <= felt[1] / 20:
        raise _leaks(model, "lets a text see the one before it in its row")


def _leaks(model: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"data.packing puts several texts into one row, and {type(base_of(model)).__name__} {why}. Set "
        "data.packing=none."
    )


def text_logits(
    model: nn.Module, tokens: TokenBatch, columns: Tensor, router_aux: bool
) -> tuple[Tensor, Tensor | None]:
    """Return logits ``(b, c, v)`` of the given columns ``(c,)``, and the router's loss if requested.

    Raises:
        ConfigError: the model has no router whose load could be balanced.
    """
    inputs, _ = _inputs(model, tokens, columns, router_aux)
    output = model(**inputs)
    return output.logits.reshape(len(tokens), len(columns), -1), _aux_loss(model, output, router_aux)


def _inputs(
    model: nn.Module, tokens: TokenBatch, columns: Tensor, router_aux: bool
) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return the inputs of the model, and the rows and columns that its head then works on."""
    extra: dict[str, Any] = {"output_router_logits": True} if router_aux else {}
    if router_aux and "output_router_logits" not in forward_parameters(model):
        raise no_router(model)
    ids, kept, shape = tokens.input_ids, columns, (len(tokens), len(columns))
    extra |= text_inputs(model, tokens)
    if tokens.segment is None:
        extra["attention_mask"] = tokens.attention_mask.long()
    elif _needs_one_row(model):
        starts = torch.arange(len(tokens), device=ids.device)[:, None] * ids.shape[1]
        extra["position_ids"] = extra["position_ids"].reshape(1, -1)
        ids, kept = ids.reshape(1, -1), (starts + columns).flatten()
        shape = (1, kept.numel())
    named = {"input_ids": ids, "logits_to_keep": kept, "use_cache": False}
    return named | extra, shape


def _aux_loss(model: nn.Module, output: Any, router_aux: bool) -> Tensor | None:
    if router_aux and not isinstance(output.aux_loss, Tensor):
        raise no_router(model)
    return output.aux_loss if router_aux else None


def _needs_one_row(model: nn.Module) -> bool:
    """Tell whether texts need to be in one row: flash attention separates them by positions there only (transformers
    5.19)."""
    return "flash" in str(base_of(model).config._attn_implementation)
