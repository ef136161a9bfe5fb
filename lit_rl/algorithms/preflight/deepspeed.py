"""Checks of DeepSpeed's ZeRO: all that it is not proven with is refused by name, before it hangs or learns wrongly.

docs/scale.md has the table of what was proven, and by which test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from lit_rl.algorithms.optim.master_weights import moves_numbers_alone, path_of
from lit_rl.algorithms.optim.zero import ZeROStrategy
from lit_rl.errors import ConfigError
from lit_rl.generation.base import Generator
from lit_rl.generation.hf import HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.reference.base import Reference

FLOAT32 = "32-true"
_INSTEAD = "or take strategy=fsdp"


def settings_fit_zero(model: LanguageModel, precision: str, strategy: DeepSpeedStrategy) -> None:
    """Refuse settings that DeepSpeed is not proven with, before anything is loaded.

    Raises:
        ConfigError: names the key.
        BackendError: there is no GPU.
    """
    if not isinstance(strategy, ZeROStrategy):
        raise ConfigError(
            f"trainer.strategy={type(strategy).__name__}: Lightning's own divides the loss by the micro-batches twice, "
            "and takes weights apart that a policy is decoded from. Take strategy=deepspeed_1, deepspeed_2 or "
            "deepspeed_3."
        )
    strategy.check_device()
    if precision != FLOAT32:
        raise ConfigError(
            f"trainer.precision={precision}: {_name(strategy)} is proven in float32 only. Take "
            f"trainer.precision={FLOAT32}, {_INSTEAD}."
        )
    if model.dtype != "float32":
        raise ConfigError(
            f"model.dtype={model.dtype}: {_name(strategy)} is proven with weights in float32 only. Take "
            f"model.dtype=float32, {_INSTEAD}."
        )
    if model.quantization is not None:
        raise ConfigError(f"model.quantization={model.quantization} was never run with DeepSpeed. Take strategy=ddp.")
    for key in ("use_liger_kernel", "compile"):
        if getattr(model, key):
            raise ConfigError(f"model.{key}=true was never run with DeepSpeed. Take false, {_INSTEAD}.")


def method_fits_zero(
    method: str,
    proven: bool,
    strategy: DeepSpeedStrategy,
    *,
    clipping: Any,
    reference: Reference | None,
    generator: Generator | None,
    parts: Mapping[str, Any],
) -> None:
    """Refuse a method, or parts of one, that DeepSpeed is not proven with, before weights are loaded.

    Functions of log-probs alone (losses, advantages, estimators) are not checked: DeepSpeed has no part in them.

    Args:
        method: Name of its class.
        proven: Whether a test has compared it with one process.
        strategy: The strategy of the run.
        clipping: `trainer.gradient_clip_algorithm`.
        reference: The reference that a term reads; None where none does.
        generator: The generator of completions; None where there is none.
        parts: Further parts that call the policy or keep data of ranks, by key; None and 0 where there is none.

    Raises:
        ConfigError: names the key.
    """
    if clipping == "value":
        raise ConfigError(
            f"trainer.gradient_clip_algorithm=value: DeepSpeed's engine clips by the norm only. Take norm, {_INSTEAD}."
        )
    if not proven:
        raise ConfigError(f"{method} was never compared with one process under DeepSpeed. Take strategy=ddp or fsdp.")
    if generator is not None and not isinstance(generator, NativeGenerator | HFGenerator):
        raise ConfigError(
            f"generator={type(generator).__name__} was never run with DeepSpeed. Take generator=native or hf, "
            f"{_INSTEAD}."
        )
    for key, part in parts.items():
        if part:
            raise ConfigError(f"{key} was never compared with one process under DeepSpeed. Leave it out, {_INSTEAD}.")
    apart = isinstance(strategy, ZeROStrategy) and strategy.stage == 3
    if apart and reference is not None and reference.moves:
        raise ConfigError(
            f"reference={type(reference).__name__} follows weights, which ZeRO stage 3 has taken apart. Take "
            f"reference=frozen_copy or strategy=deepspeed_2, {_INSTEAD}."
        )


def optimizer_fits_zero(optimizer: Any) -> None:
    """Refuse an optimizer that depends on the shape of weights: it would see one vector of parts of many weights.

    Raises:
        ConfigError: names its path.
    """
    path = path_of(optimizer)
    if not moves_numbers_alone(path) and path not in _DEEPSPEEDS_OWN:
        raise ConfigError(
            f"optimizer={path} is not known to move each number of a weight by itself, and DeepSpeed gives it parts "
            f"of many weights as one vector. Take optimizer=adamw, {_INSTEAD}."
        )


_DEEPSPEEDS_OWN = ("deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",)


def model_fits_zero(policy: nn.Module, strategy: ZeROStrategy) -> None:
    """Refuse a mixture of experts under stage 3: a rank without rows for an expert would not gather it, and hang
    others.

    Raises:
        ConfigError: the policy is one.
    """
    configs = (getattr(part, "config", None) for part in policy.modules())
    experts = any(int(getattr(config, name, 0) or 0) > 1 for config in configs for name in _EXPERTS)
    if strategy.stage == 3 and experts:
        raise ConfigError(
            "strategy=deepspeed_3 gathers what a rank computes, and of a mixture of experts ranks compute different "
            "parts, so they would wait for each other for ever. Take strategy=fsdp or strategy=deepspeed_2."
        )


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _name(strategy: ZeROStrategy) -> str:
    return f"strategy=deepspeed_{strategy.stage}"
