"""The base model under adapters, its trunk (the model without its head), and ways to have a second trunk."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from lit_rl.core.errors import ConfigError
from lit_rl.models.vision_parts import freeze, sees

if TYPE_CHECKING:
    from peft import PeftModel


def base_of(model: nn.Module) -> Any:
    """Return the model under a PEFT wrapper, or the model itself. Adapters stay where they are: inside its layers."""
    from peft import PeftModel

    return model.get_base_model() if isinstance(model, PeftModel) else model


def name_in_base(name: str) -> str:
    """Return the name of a weight in the plain model, by its name under adapters."""
    for part in (".base_layer", ".token_adapter", ".original_module"):
        name = name.replace(part, "")
    return re.sub(r"\.modules_to_save\.\w+", "", name).removeprefix("base_model.model.")


def trunk_of(model: nn.Module) -> nn.Module:
    """Return the module that computes the hidden states that a causal language model's head reads.

    Raises:
        ConfigError: the model does not say which of its modules that is.
    """
    base = base_of(model)
    trunk = getattr(base, "base_model", base)
    if trunk is base:
        raise ConfigError(
            f"{type(base).__name__} does not name its trunk (base_model_prefix), so no head can be put on it. Use "
            "an algorithm without a critic."
        )
    return trunk


def hidden_size(model: nn.Module) -> int:
    """Return the width of the hidden states that the model's head reads."""
    return base_of(model).get_output_embeddings().in_features


@contextmanager
def recorded_outputs(module: nn.Module) -> Iterator[list[Any]]:
    """Yield a list that gets the outputs of the module's forward passes, inside the context."""
    outputs: list[Any] = []
    hook = module.register_forward_hook(lambda _, inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        hook.remove()


def trained_of_base(policy: nn.Module) -> list[str]:
    """Return names of the base's own weights that are trained beside the adapters of a policy.

    These are a bias (`bias="all"`), or weights that a user unfroze. Switching the adapters off leaves them as they were
    trained.
    """
    from peft import PeftModel

    if not isinstance(policy, PeftModel):
        return []
    beside = (str(getattr(policy.base_model, "prefix", "")) or "lora_", "modules_to_save.", "token_adapter.")
    return [
        name for name, p in policy.named_parameters() if p.requires_grad and not any(each in name for each in beside)
    ]


def shared_copy(policy: nn.Module) -> Any:
    """Return a copy that shares the parameters without gradient: with an adapter, it costs no more than the adapter."""
    # Parameters in the memo are taken as they are.
    frozen = {id(p): p for p in policy.parameters() if not p.requires_grad}
    return copy.deepcopy(policy, memo=frozen)


def frozen_trunk(policy: nn.Module, key: str) -> nn.Module:
    """Return a second trunk of the policy's frozen base, without its adapters. It shares the weights: it costs none.

    New adapters on it are seen by it alone, and the policy's by the policy alone: nothing has to be switched on, off
    or back, also not where a backward pass computes activations anew (gradient checkpointing).

    Raises:
        ConfigError: the policy has no adapters, so its base is not frozen. The message names ``key``.
    """
    from peft import PeftModel

    if not isinstance(policy, PeftModel):
        raise ConfigError(
            f"{key} puts an adapter on the policy's frozen base, but every weight of this policy is trained. Set "
            "model.lora or model.adapter."
        )
    return trunk_of(without_adapters(shared_copy(policy))).requires_grad_(False)


def without_adapters(model: PeftModel) -> Any:
    """Return the base as it was loaded, out of a model that is used up: also the modules that adapters replace
    whole."""
    from peft.utils import ModulesToSaveWrapper

    for part in model.modules():
        if isinstance(part, ModulesToSaveWrapper):  # unloading would leave the trained module in its place
            part.modules_to_save[str(part.active_adapter)] = part.original_module
    return model.unload()


def copied_trunk(policy: nn.Module) -> nn.Module:
    """Return a copy of the policy's trunk, adapters merged, that shares no tensor with it.

    Everything in it is trained but what the policy does not train; beside adapters, what sees.
    """
    from peft import PeftModel

    if isinstance(policy, PeftModel):
        merged: Any = copy.deepcopy(policy).merge_and_unload()
        merged.requires_grad_(True)
        if sees(merged.config):
            freeze(merged, ["vision"])
        return trunk_of(merged)
    return copy.deepcopy(trunk_of(policy))
