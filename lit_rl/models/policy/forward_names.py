"""What a model's forward pass takes by name, read from its own signature: transformers has renamed some of it."""

from __future__ import annotations

import inspect
from typing import Any, Literal

from torch import nn

from lit_rl.models.policy.trunk import base_of


def forward_parameters(model: nn.Module) -> frozenset[str]:
    """Return the parameter names of a model's forward pass, under a PEFT wrapper, which takes anything."""
    return frozenset(inspect.signature(base_of(model).forward).parameters)


def cache_name(model: nn.Module) -> Literal["cache", "past_key_values"] | None:
    """Return the name under which a model's forward pass takes its cache of keys and values; None: it takes none.

    transformers 5.24 says ``cache``; releases before it, and models with code of their own, ``past_key_values``.
    """
    parameters = forward_parameters(model)
    return "cache" if "cache" in parameters else "past_key_values" if "past_key_values" in parameters else None


def cache_input(model: nn.Module, cache: Any) -> dict[str, Any]:
    """Return the keyword that gives a cache to a model that takes one."""
    name = cache_name(model)
    assert name is not None
    return {name: cache}
