"""From completions to what a policy, or its reference, thinks of each response token."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, cat, nn

from lit_rl.errors import ConfigError
from lit_rl.models.policy.trunk import base_of
from lit_rl.ops.logprobs import logprobs_and_entropy, logprobs_and_entropy_with_gradient
from lit_rl.rollout import Completions, Sampling


@dataclass(frozen=True)
class TokenScores:
    """What one forward pass says about response tokens. Values at padding are numbers without meaning: mask them."""

    logprobs: Tensor
    """Float32 ``(b, t)``, with gradient: of the distribution that the sampling settings make of the model's logits."""
    entropy: Tensor
    """Float32 ``(b, t)``: of the same distribution, in nats. Without gradient, unless it was asked for."""
    aux_loss: Tensor | None = None
    """0-dim, with gradient: the router's load-balancing loss. None unless it was asked for."""
    values: Tensor | None = None
    """Float ``(b, t)``, with gradient: what a critic expects. None without a critic."""


def score(
    model: nn.Module,
    completions: Completions,
    sampling: Sampling,
    *,
    entropy_gradient: bool = False,
    router_aux: bool = False,
) -> TokenScores:
    """Score the response tokens under the distribution that ``sampling`` draws from, given this model's logits.

    That is ``softmax(logits / temperature)`` over the tokens that top-k, top-p and min-p keep of *these* logits, and
    the token itself (``lit_rl.ops.logprobs``). With the weights that drew the tokens it equals ``sampler_logprobs``.
    What depends on earlier tokens (repetition penalty, ``min_new_tokens``) has no part in it.

    Args:
        model: A causal language model; under PEFT with the adapter that is active.
        completions: Of ``b`` rows.
        sampling: What drew them. Its temperature is above 0.
        entropy_gradient: Whether the entropy takes part in the backward pass.
        router_aux: Whether to compute the load-balancing loss of a mixture of experts (2101.03961, eq. 4 to 6), as
            transformers does: over the attended tokens, prompts included, and all layers, without its coefficient.

    Raises:
        ConfigError: the model has no router whose load could be balanced.
    """
    extra = {"output_router_logits": True} if router_aux else {}
    if router_aux and "output_router_logits" not in inspect.signature(base_of(model).forward).parameters:
        raise no_router(model)
    output = _forward(model, completions, **extra)
    aux_loss = output.aux_loss if router_aux else None
    if router_aux and not isinstance(aux_loss, Tensor):
        raise no_router(model)
    scored = logprobs_and_entropy_with_gradient if entropy_gradient else logprobs_and_entropy
    logprobs, entropy = scored(
        _of_response(output.logits, completions),
        completions.response_ids,
        temperature=float(sampling.temperature),
        truncation=sampling.truncation,
    )
    return TokenScores(logprobs, entropy, aux_loss)


def token_logits(model: nn.Module, completions: Completions) -> Tensor:
    """Logits ``(b, t, v)`` that predict each response token, in the model's own type.

    Positions count attended tokens, so padding changes nothing, also where positions are absolute (GPT-2). The head
    works on the t positions that predict a response token, never on the prompt.
    """
    return _of_response(_forward(model, completions).logits, completions)


def token_logprobs(model: nn.Module, completions: Completions, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens under ``softmax(logits / temperature)`` with gradient, and entropies without.

    Both are float32 ``(b, t)``. Values at padding are numbers without meaning: mask them.
    """
    return logprobs_and_entropy(token_logits(model, completions), completions.response_ids, temperature=temperature)


def _forward(model: nn.Module, completions: Completions, **extra: Any) -> Any:
    mask = completions.attention_mask.long()
    return model(
        input_ids=cat([completions.prompt_ids, completions.response_ids], dim=1),
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        logits_to_keep=completions.response_ids.shape[1] + 1,
        use_cache=False,
        **completions.model_inputs,
        **extra,
    )


def _of_response(logits: Tensor, completions: Completions) -> Tensor:
    return logits[:, -(completions.response_ids.shape[1] + 1) : -1]


def no_router(model: nn.Module) -> ConfigError:
    """The refusal of a model whose experts report no load."""
    return ConfigError(
        f"algo.router_aux_loss_coef balances the load of the experts of a mixture, and {type(base_of(model)).__name__} "
        "has no router that reports one. Set it to 0, or take a mixture-of-experts model."
    )
