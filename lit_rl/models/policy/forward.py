"""From completions to what a policy, or its reference, thinks of each response token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lit_rl.errors import ConfigError
from lit_rl.models.policy.forward_names import forward_parameters
from lit_rl.models.policy.fused_accumulation import fused_accumulation
from lit_rl.models.policy.head import Targets, TargetScores, run
from lit_rl.models.policy.known_masks import known_masks
from lit_rl.models.policy.options import DEFAULT, ForwardOptions
from lit_rl.models.policy.positions import trunk_inputs
from lit_rl.models.policy.rows_by_length import by_length
from lit_rl.models.policy.shared_prefix import run_shared, shared_prompts
from lit_rl.models.policy.trunk import base_of
from lit_rl.ops.history import History
from lit_rl.ops.linear_logprobs import Distribution
from lit_rl.rollout import Completions, Sampling, select, trim


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


def score(
    model: nn.Module,
    completions: Completions,
    sampling: Sampling,
    *,
    entropy: bool = False,
    entropy_gradient: bool = False,
    router_aux: bool = False,
    options: ForwardOptions = DEFAULT,
) -> TokenScores:
    """Score the response tokens under the distribution that ``sampling`` draws from, given this model's logits.

    That is ``softmax(logits / temperature)`` over the tokens that top-k, top-p and min-p keep of *these* logits, and
    the token itself (``lit_rl.ops.logprobs``), after what repetition penalty and ``min_new_tokens`` make of the logits
    (``lit_rl.ops.history``). With the weights that drew the tokens it equals ``sampler_logprobs``.

    Args:
        model: A causal language model; under PEFT with the adapter that is active.
        completions: Of ``b`` rows.
        sampling: What drew them. Its temperature is above 0.
        entropy: Whether to compute entropies.
        entropy_gradient: Whether to compute them, and they take part in the backward pass.
        router_aux: Whether to compute the load-balancing loss of a mixture of experts (2101.03961, eq. 4 to 6), as
            transformers does: over the attended tokens, prompts included, and all layers, without its coefficient.
        options: How.

    Raises:
        ConfigError: the model has no router whose load could be balanced.
    """
    distribution = _distribution(sampling, entropy=entropy or entropy_gradient, entropy_gradient=entropy_gradient)
    if router_aux:
        if "output_router_logits" not in forward_parameters(model):
            raise no_router(model)
        with fused_accumulation(model, options):
            scores, output = _one_call(
                model, completions.with_host(), sampling, distribution, options, output_router_logits=True
            )
        if not isinstance(output.aux_loss, Tensor):
            raise no_router(model)
        return _token_scores(scores, output.aux_loss)
    return _token_scores(_run(model, completions, sampling, distribution, options))


def response_logprobs(
    model: nn.Module, completions: Completions, sampling: Sampling, options: ForwardOptions = DEFAULT
) -> Tensor:
    """Return the float32 ``(b, t)`` log-probs of `score` alone."""
    return _run(model, completions, sampling, _distribution(sampling), options).logprobs


def _run(
    model: nn.Module, completions: Completions, sampling: Sampling, distribution: Distribution, options: ForwardOptions
) -> TargetScores:
    completions = completions.with_host()
    with fused_accumulation(model, options):
        prompts = shared_prompts(model, completions) if options.shared_prompts else None
        if prompts is not None:
            return run_shared(model, completions, prompts, distribution, options, _history(completions, sampling))
        return _run_by_length(model, completions, sampling, distribution, options)


def _run_by_length(
    model: nn.Module, completions: Completions, sampling: Sampling, distribution: Distribution, options: ForwardOptions
) -> TargetScores:
    def called(part: Completions) -> TargetScores:
        return _one_call(model, part, sampling, distribution, options)[0]

    if not options.rows_by_length or isinstance(model, FSDPModule):
        return called(completions)
    calls = by_length(completions.on_host.attention_mask.sum(1), completions.response_ids.device)
    if len(calls) == 1:
        return called(completions)
    parts = [called(trim(select(completions, call.rows))) for call in calls]
    return TargetScores.of_calls(parts, calls, completions.response_ids.shape[1])


def _one_call(
    model: nn.Module,
    completions: Completions,
    sampling: Sampling,
    distribution: Distribution,
    options: ForwardOptions,
    **extra: Any,
) -> tuple[TargetScores, Any]:
    ids, host, history = completions.response_ids, completions.on_host, _history(completions, sampling)
    targets = Targets(ids, host.response_mask, first=-_kept(completions), history=history)
    inputs = {**trunk_inputs(model, completions), "logits_to_keep": _kept(completions), "use_cache": False}
    with known_masks(host.attention_mask):
        return run(model, targets, distribution, fused=options.fused_head, **inputs, **extra)


def _distribution(sampling: Sampling, **wanted: bool) -> Distribution:
    return Distribution(float(sampling.temperature), sampling.truncation, **wanted)


def _history(completions: Completions, sampling: Sampling) -> History | None:
    """Return how earlier tokens change the logits of each response token; None where they do not."""
    holds = sampling.min_new_tokens > 0 and completions.held_back is not None
    if sampling.repetition_penalty == 1 and not holds:
        return None
    ids, p = completions.response_ids, completions.prompt_ids.shape[1]
    rows, columns = (torch.arange(size, device=ids.device) for size in ids.shape)
    ends = completions.held_back[0] if holds and completions.held_back is not None else ids.new_empty(0)
    return History(
        early=completions.spoken < sampling.min_new_tokens,
        row=rows[:, None].expand(ids.shape),
        place=(p + columns).expand(ids.shape),
        texts=torch.cat([completions.prompt_ids, ids], 1).masked_fill(~completions.attention_mask, -1),
        ends=ends,
        penalty=float(sampling.repetition_penalty),
    )


def _token_scores(found: TargetScores, aux_loss: Tensor | None = None) -> TokenScores:
    return TokenScores(found.logprobs, found.entropy, aux_loss)


def _kept(completions: Completions) -> int:
    """Return the number of positions that the head works on: those that predict a response token, and the last one."""
    return completions.response_ids.shape[1] + 1


def no_router(model: nn.Module) -> ConfigError:
    """Return the error for a model whose experts report no load."""
    return ConfigError(
        f"algo.router_aux_loss_coef balances the load of the experts of a mixture, and {type(base_of(model)).__name__} "
        "has no router that reports one. Set it to 0, or take a mixture-of-experts model."
    )
