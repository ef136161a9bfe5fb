"""From texts to what a scoring model says of them, and the load of its experts."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lit_rl.examples import TokenBatch
from lit_rl.models.policy.forward import no_router
from lit_rl.models.policy.known_masks import known_masks
from lit_rl.models.policy.positions import text_inputs
from lit_rl.models.policy.trunk import base_of


def scoring_logits(model: nn.Module, tokens: TokenBatch, *, router_aux: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return float32 logits with gradient, `(b, labels)` of sequences or `(b, s, labels)` of tokens, and the router's
    loss.

    transformers' classifiers keep their trunk's router logits to themselves; the loss is made of these as the language
    model of the same family makes its own, so on equal weights both report the same number.

    Args:
        model: A sequence or token classifier; under PEFT with the adapter that is active.
        tokens: `b` rows, one text each.
        router_aux: Whether to compute the load-balancing loss of a mixture of experts (2101.03961, eq. 4 to 6): over
            the attended tokens and all layers, without its coefficient. A 0-dim tensor with gradient; None otherwise.

    Raises:
        ConfigError: the model has no router whose load could be balanced.
    """
    inputs: dict[str, Any] = {"input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask.long()}
    if tokens.vision is not None:
        inputs |= text_inputs(model, tokens)
    if not router_aux:
        with known_masks(tokens.on_host.attention_mask):
            return model(**inputs, use_cache=False).logits.float(), None
    base = base_of(model)
    balance = _load_balancing(base)
    if balance is None:
        raise no_router(model)
    with _outputs_of(base.base_model) as seen, known_masks(tokens.on_host.attention_mask):
        logits = model(**inputs, use_cache=False, output_router_logits=True).logits.float()
    routed = getattr(seen[-1], "router_logits", None)
    if not routed:
        raise no_router(model)
    return logits, balance(routed, inputs["attention_mask"])


def _load_balancing(base: Any) -> Callable[[Any, Tensor], Tensor] | None:
    """Return the load-balancing loss of the family's language model, from router logits and the attention mask; None:
    none.

    FSDP2 gives a model a class of its own, so the family's file is that of some class above it.
    """
    homes = (sys.modules[cls.__module__] for cls in type(base).__mro__)
    function = next((found for home in homes if (found := getattr(home, "load_balancing_loss_func", None))), None)
    if function is None:
        return None
    config = base.config.get_text_config()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", 0)
    known = {"num_experts": experts, "top_k": config.num_experts_per_tok, "num_keys": math.isqrt(experts)}
    settings = {name: value for name, value in known.items() if name in inspect.signature(function).parameters}
    return lambda routed, mask: function(routed, **settings, attention_mask=mask)


@contextmanager
def _outputs_of(module: nn.Module) -> Iterator[list[Any]]:
    """Yield a list that gets the outputs of the module, inside the context."""
    seen: list[Any] = []
    hook = module.register_forward_hook(lambda _, inputs, output: seen.append(output))
    try:
        yield seen
    finally:
        hook.remove()
