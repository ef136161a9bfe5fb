"""Scores of tokens by a model: of completions (policy, reference) and of texts, and trials that a model is causal.

`score` is for rollouts: log-probs of the response tokens under the distribution they were drawn from. `score_texts`
is for given texts, packed ones included: log-probs under the plain softmax. `refuse_leaks` and `refuse_lookahead`
find, by short passes, models that would score a token by texts beside it or by tokens behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lit_rl.core.branches import branches_of
from lit_rl.core.errors import ConfigError
from lit_rl.core.examples import TokenBatch
from lit_rl.core.rollout import Completions, Sampling, select, trim
from lit_rl.core.transfers import to_device
from lit_rl.core.vision_inputs import PromptVision, Vision
from lit_rl.models.forward_inputs import (
    Bucket,
    bucket_by_length,
    forward_parameters,
    known_masks,
    text_inputs,
    trunk_inputs,
)
from lit_rl.models.head import Targets, TargetScores, fused_accumulation, score_targets
from lit_rl.models.language_model import DEFAULT, ForwardOptions
from lit_rl.models.modes import evaluation_mode
from lit_rl.models.sharding import device_of
from lit_rl.models.shared_prefix import run_shared, shared_prompts
from lit_rl.models.trunk import base_of
from lit_rl.models.vision_parts import placeholder_ids
from lit_rl.ops.fused_head import Distribution
from lit_rl.ops.logprobs import TokenStats
from lit_rl.ops.sampling_distribution import History


@dataclass(frozen=True)
class TokenScores:
    """Scores of response tokens by one forward pass. Values at padding are numbers without meaning: mask them."""

    logprobs: Tensor
    """Float32 ``(b, t)``, with gradient: of the distribution that the sampling settings make of the model's logits."""
    entropy: Tensor | None = None
    """Float32 ``(b, t)``: of the same distribution, in nats. None unless it was asked for, and its gradient too."""
    aux_loss: Tensor | None = None
    """0-dim, with gradient: the router's load-balancing loss. None unless it was asked for."""
    values: Tensor | None = None
    """Float ``(b, t)``, with gradient: what a critic expects. None without a critic."""
    stats: TokenStats | None = None
    """``(b, t)`` each, without gradient, of the same distribution. None unless they were asked for."""
    further: Tensor | None = None
    """Float32 ``(b, t, k)``, with gradient: log-probs of further tokens, of the same distribution. None without
    them."""

    def mapped(self, change: Callable[[Tensor], Tensor]) -> TokenScores:
        """Return the scores in another shape."""
        found = TargetScores(self.logprobs, self.entropy, self.stats).mapped(change)
        values = None if self.values is None else change(self.values)
        return TokenScores(found.logprobs, found.entropy, self.aux_loss, values, found.stats)


def score(  # noqa: PLR0913 (one keyword a number that is asked for)
    model: nn.Module,
    completions: Completions,
    sampling: Sampling,
    *,
    entropy: bool = False,
    entropy_gradient: bool = False,
    router_aux: bool = False,
    stats: bool = False,
    further_ids: Tensor | None = None,
    options: ForwardOptions = DEFAULT,
) -> TokenScores:
    """Score the response tokens under the distribution that ``sampling`` draws from, given this model's logits.

    That is ``softmax(logits / temperature)`` over the tokens that top-k, top-p and min-p keep of *these* logits, and
    the token itself (``lit_rl.ops.logprobs``), after what repetition penalty and ``min_new_tokens`` make of the logits
    (``lit_rl.ops.sampling_distribution``). With the weights that drew the tokens it equals ``sampler_logprobs``.
    Completions that fork are scored branch by branch, each token behind what was read when it was drawn.

    Args:
        model: A causal language model; under PEFT with the adapter that is active.
        completions: Completions, ``b`` rows.
        sampling: Settings that drew them. The temperature is above 0.
        entropy: Whether to compute entropies.
        entropy_gradient: Whether to compute them, and they take part in the backward pass.
        router_aux: Whether to compute the load-balancing loss of a mixture of experts (2101.03961, eq. 4 to 6), as
            transformers does: over the attended tokens, prompts included, and all layers, without its coefficient.
        stats: Whether to compute `lit_rl.ops.logprobs.TokenStats`: where ``sampling`` neither truncates nor reshapes.
        further_ids: Long ``(b, t, k)``: further tokens at each position to score, under the same condition. None: none.
        options: Choices for computing the pass.

    Raises:
        ConfigError: the model has no router whose load could be balanced.
    """
    if completions.follows is not None:
        assert further_ids is None, "a teacher's tokens beside branches are refused by the settings"
        branches = branches_of(completions)
        wanted: dict[str, Any] = {"entropy": entropy, "entropy_gradient": entropy_gradient}
        wanted |= {"router_aux": router_aux, "stats": stats}
        return score(model, branches.rows, sampling, **wanted, options=options).mapped(branches.fold)
    experts = _router_inputs(model, router_aux)
    completions, entropy = completions.with_host(), entropy or entropy_gradient
    distribution = Distribution(
        float(sampling.temperature),
        sampling.truncation,
        entropy=entropy,
        entropy_gradient=entropy_gradient,
        stats=stats,
    )

    def score_rows(rows: Completions, further: Tensor | None = further_ids) -> tuple[TargetScores, Any]:
        """Return the scores of rows that run in one call of the model, and its output."""
        ids, host = rows.response_ids, rows.on_host
        columns = ids.shape[1] + 1  # positions that predict a response token, and the last one
        targets = Targets(
            ids, host.response_mask, first=-columns, history=_history(rows, sampling), further_ids=further
        )
        inputs = {**trunk_inputs(model, rows), "logits_to_keep": columns, "use_cache": False}
        with known_masks(host.attention_mask):
            return score_targets(model, targets, distribution, fused=options.fused_head, **inputs, **experts)

    with fused_accumulation(model, options):
        if router_aux:
            scores, output = score_rows(completions)
            aux_loss = _aux_loss(model, output, True)
            return TokenScores(scores.logprobs, scores.entropy, aux_loss, stats=scores.stats, further=scores.further)
        prompts = shared_prompts(model, completions) if options.shared_prompts else None
        buckets: list[Bucket] = []
        if prompts is None and options.rows_by_length and not isinstance(model, FSDPModule):
            buckets = bucket_by_length(completions.on_host.attention_mask.sum(1), completions.response_ids.device)
        if prompts is not None:
            past = _history(completions, sampling)
            scores = run_shared(model, completions, prompts, distribution, options, past, further_ids)
        elif len(buckets) < 2:
            scores, _ = score_rows(completions)
        else:
            parts = []
            for bucket in buckets:
                rows, further = trim(select(completions, bucket.rows)), None
                if further_ids is not None:
                    further = further_ids[to_device(bucket.rows, further_ids.device), : rows.response_ids.shape[1]]
                parts.append(score_rows(rows, further)[0])
            scores = TargetScores.of_buckets(parts, buckets, completions.response_ids.shape[1])
    return TokenScores(scores.logprobs, scores.entropy, stats=scores.stats, further=scores.further)


def response_logprobs(
    model: nn.Module, completions: Completions, sampling: Sampling, options: ForwardOptions = DEFAULT
) -> Tensor:
    """Return the float32 ``(b, t)`` log-probs of `score` alone."""
    return score(model, completions, sampling, options=options).logprobs


def _history(completions: Completions, sampling: Sampling) -> History | None:
    """Return how earlier tokens change the logits of each response token; None where they do not."""
    holds = sampling.min_new_tokens > 0 and completions.blocked_eos is not None
    if sampling.repetition_penalty == 1 and not holds:
        return None
    ids, p = completions.response_ids, completions.prompt_ids.shape[1]
    rows, columns = (torch.arange(size, device=ids.device) for size in ids.shape)
    ends = completions.blocked_eos[0] if holds and completions.blocked_eos is not None else ids.new_empty(0)
    return History(
        early=completions.index_in_turn < sampling.min_new_tokens,
        row=rows[:, None].expand(ids.shape),
        place=(p + columns).expand(ids.shape),
        texts=torch.cat([completions.prompt_ids, ids], 1).masked_fill(~completions.attention_mask, -1),
        ends=ends,
        penalty=float(sampling.repetition_penalty),
    )


def no_router_error(model: nn.Module) -> ConfigError:
    """Return the error for a model whose experts report no load."""
    return ConfigError(
        f"algo.router_aux_loss_coef balances the load of the experts of a mixture, and {type(base_of(model)).__name__} "
        "has no router that reports one. Set it to 0, or take a mixture-of-experts model."
    )


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
        stats: Whether to compute `lit_rl.ops.logprobs.TokenStats`.
        router_aux: Whether to compute the load-balancing loss of a mixture of experts (2101.03961, eq. 4 to 6).
        options: Whether the head is fused, rows of like length run together (rows with several texts never do), and how
            many rows a call without gradient may have. A router's loss is over all rows, which are one call.

    Raises:
        ConfigError: the model has no router whose load could be balanced.
    """
    tokens = tokens.with_host()
    width, distribution = tokens.input_ids.shape[1] - 1, Distribution(entropy=entropy, stats=stats)
    buckets: list[Bucket] = []  # the rows of each call of the model
    if not router_aux and not isinstance(model, FSDPModule):
        buckets = [Bucket(torch.arange(len(tokens)), width + 1)]
        if options.rows_by_length and tokens.segment is None:
            buckets = bucket_by_length(tokens.on_host.attention_mask.sum(1), tokens.input_ids.device)
        if (most := options.most_rows) is not None and not torch.is_grad_enabled():
            buckets = [Bucket(rows, each.width) for each in buckets for rows in each.rows.split(most)]
    with fused_accumulation(model, options):
        if len(buckets) < 2:
            scores, aux_loss = _one_text_call(model, tokens, distribution, router_aux, options)
        else:
            parts = [
                _one_text_call(model, tokens.take(bucket.rows, bucket.width), distribution, False, options)[0]
                for bucket in buckets
            ]
            scores, aux_loss = TargetScores.of_buckets(parts, buckets, width), None
    return TextScores(scores.logprobs, scores.entropy, scores.stats, aux_loss)


def _one_text_call(
    model: nn.Module, tokens: TokenBatch, distribution: Distribution, router_aux: bool, options: ForwardOptions
) -> tuple[TargetScores, Tensor | None]:
    """Return `(b, s - 1)` of every row in one call of the model, and the router's loss if requested."""
    host = tokens.on_host
    learned_columns = host.learned.any(0).nonzero().flatten()
    learned_columns = learned_columns if len(learned_columns) else torch.zeros(1, dtype=torch.long)
    columns = to_device(learned_columns, tokens.input_ids.device)
    inputs, shape = _inputs(model, tokens, columns, router_aux)
    ids, learned = tokens.input_ids[:, 1:][:, columns], host.learned[:, learned_columns]
    with known_masks(host.attention_mask) if tokens.segment is None else known_masks(positions=host.position_ids):
        scores, output = score_targets(
            model,
            Targets(ids.reshape(shape), learned.reshape(shape)),
            distribution,
            fused=options.fused_head,
            **inputs,
        )

    def spread(part: Tensor) -> Tensor:
        wide = part.new_zeros(len(tokens), tokens.input_ids.shape[1] - 1)
        return wide.index_copy(1, columns, part.reshape(ids.shape))

    return scores.mapped(spread), _aux_loss(model, output, router_aux)


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
    differences = []
    try:
        with evaluation_mode(model):
            for texts in (segment, None):
                logprobs = score_texts(model, TokenBatch(ids, torch.ones_like(mask), mask, texts)).logprobs
                differences.append((logprobs[0] - logprobs[1]).abs().max().item())
    except TypeError as error:
        raise _packing_error(model, f"takes no position_ids ({error})") from error
    # What is left of rounding in half precision is far below what a text feels of its own beginning.
    if not differences[0] <= differences[1] / 20:
        raise _packing_error(model, "lets a text see the one before it in its row")


def _packing_error(model: nn.Module, why: str) -> ConfigError:
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
    extra = _router_inputs(model, router_aux)
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


def _router_inputs(model: nn.Module, router_aux: bool) -> dict[str, Any]:
    """Return the inputs of a model whose router's loss is requested, or none."""
    if router_aux and "output_router_logits" not in forward_parameters(model):
        raise no_router_error(model)
    return {"output_router_logits": True} if router_aux else {}


def _aux_loss(model: nn.Module, output: Any, router_aux: bool) -> Tensor | None:
    if router_aux and not isinstance(output.aux_loss, Tensor):
        raise no_router_error(model)
    return output.aux_loss if router_aux else None


def _needs_one_row(model: nn.Module) -> bool:
    """Tell whether texts need to be in one row: flash attention separates them by positions there only (transformers
    5.19)."""
    return "flash" in str(base_of(model).config._attn_implementation)


_LOOKAHEAD_TOKENS = 4
_LOOKAHEAD_LIMIT = 0.02
"""The limit in nats: far above the rounding of half precision, far below what a model that looks ahead loses (0.3 to
0.5)."""


@torch.no_grad()
def refuse_lookahead(model: nn.Module, prompt_ids: Sequence[int], vision: PromptVision | None) -> None:
    """Refuse a model in which a token of a response is scored by the tokens behind it, by one short forward pass.

    Models such as PaliGemma attend both ways over a prefix, which a value for each token marks. With the wrong values
    over the response, log-probs would know the answer, and nothing would say so.

    Args:
        model: A language model over images.
        prompt_ids: Tokens of one prompt.
        vision: Images of the prompt.

    Raises:
        ConfigError: the log-prob of a token changes with a later one.
    """
    device, config = device_of(model), base_of(model).config
    placeholders = placeholder_ids(config)
    tokens = islice(
        (token for token in range(config.get_text_config().vocab_size) if token not in placeholders),
        _LOOKAHEAD_TOKENS + 1,
    )
    *shared, last, another = tokens
    rows = torch.tensor([[*shared, last], [*shared, another]], device=device)
    prompts = torch.tensor([list(prompt_ids)] * 2, device=device)
    all_true = torch.ones_like(rows, dtype=torch.bool)
    completions = Completions(
        prompt_ids=prompts,
        prompt_mask=torch.ones_like(prompts, dtype=torch.bool),
        response_ids=rows,
        response_mask=all_true,
        sampler_logprobs=torch.zeros(rows.shape, device=device),
        ended=all_true[:, 0],
        group_id=torch.zeros(2, dtype=torch.long, device=device),
        vision=Vision.of([vision], 2),
    )
    with evaluation_mode(model):
        sampling = Sampling(max_new_tokens=_LOOKAHEAD_TOKENS)
        try:
            first, second = score(model, completions, sampling, options=DEFAULT.in_one_call).logprobs[:, :-1]
        except ValueError as error:  # transformers counts placeholders and features, where it does
            raise ConfigError(
                f"{type(base_of(model)).__name__} cannot read the first prompt with images: {error}. Its processor's "
                "files may be another model's."
            ) from error
    moved = (first - second).abs().max().item()
    if not moved <= _LOOKAHEAD_LIMIT:
        raise ConfigError(
            f"{type(base_of(model)).__name__} scores a token of a response by tokens that follow it: log-probs move by "
            f"{moved:.2g} nats when only the last token is another. It cannot be trained by its log-probs here; take a "
            "model of another family, such as Idefics3, LLaVA, Gemma 3 or Qwen-VL."
        )
