"""Checks of `strategy=fsdp_tp`: methods, models and parts that it is not proven with are refused by name.

docs/scale.md has the table of what was proven, and by which test.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lit_rl.algorithms.optim.master_weights import moves_numbers_alone, path_of
from lit_rl.errors import ConfigError
from lit_rl.generation.hf import HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.policy.loaded import LoadedModel
from lit_rl.models.policy.tensor_parallel import check_plan
from lit_rl.models.reference.base import Auto, FrozenCopy
from lit_rl.rewards.scorers.classifier import Classifier

_INSTEAD = "or take strategy=fsdp"
_UNDER = "was never compared with one process under strategy=fsdp_tp"


def fits_tensor_parallel(name: str, *, proven: bool, stage: str, tp_size: int, precision: str, model: Any) -> None:
    """Refuse a method, model or precision that was never compared with one process, before anything is loaded.

    Args:
        name: Name of the method's class.
        proven: Whether the method was compared.
        stage: Lightning's stage: "fit", "validate", ...
        tp_size: Ranks of a tensor-parallel group.
        precision: The Trainer's precision.
        model: The `LanguageModel`.

    Raises:
        ConfigError: names the key.
    """
    if stage == "predict":
        raise ConfigError(f"lit-rl predict {_UNDER}: its ranks write a file each. Take strategy=auto, {_INSTEAD}.")
    if not proven:
        raise ConfigError(f"algo={name} {_UNDER}: GRPO, DPO and SFT were. Take one of these, {_INSTEAD}.")
    _model_fits(model, precision, tp_size)


def _model_fits(model: Any, precision: str, tp_size: int) -> None:
    settings = {
        "trainer.precision": (precision, "32-true"),
        "model.dtype": (model.dtype, "float32"),
        "model.lora": (model.lora, None),
        "model.adapter": (model.adapter, None),
        "model.quantization": (model.quantization, None),
        "model.use_liger_kernel": (model.use_liger_kernel, False),
        "model.compile": (model.compile, False),
    }
    for key, (came, allowed) in settings.items():
        if came != allowed:
            word = {None: "null", False: "false"}.get(allowed, allowed)
            raise ConfigError(f"{key}={came} {_UNDER}. Take {key}={word}, {_INSTEAD}.")
    if isinstance(model, LoadedModel) or model.sees:
        what = "a model over images" if model.sees else "an object"
        raise ConfigError(
            f"model.name={model.name!r} is {what}, which {_UNDER}. Take a text model by name, {_INSTEAD}."
        )
    check_plan(model.config, tp_size)


def method_fits_tensor_parallel(
    *,
    reference: Any,
    generator: Any,
    rewards: Any,
    env: Any,
    replay: Any,
    groups: Any,
    win_rate_against: str | None,
    precomputed: Any,
    clips_by_value: bool,
    optimizer: str | None,
) -> None:
    """Refuse parts of a method that were never compared with one process; each is None where there is none.

    Args:
        reference: The reference.
        generator: The generator.
        rewards: The `Rewards`.
        env: The environments.
        replay: The replay buffer.
        groups: The selection of groups that are learned from.
        win_rate_against: The model whose completions a judge compares in a validation.
        precomputed: Precomputed log-probs of the reference.
        clips_by_value: Whether gradients are clipped by value.
        optimizer: Dotted path of the optimizer; None where it is known only once it is built.

    Raises:
        ConfigError: names the key.
    """
    if reference is not None and not isinstance(reference, Auto | FrozenCopy):
        raise ConfigError(f"reference={type(reference).__name__} {_UNDER}. Take reference=frozen_copy, {_INSTEAD}.")
    if precomputed is not None:
        raise ConfigError(f"algo.precompute_reference=true {_UNDER}. Set it to false, {_INSTEAD}.")
    if env is not None:
        raise ConfigError(f"env={type(env).__name__} {_UNDER}. Leave it out, {_INSTEAD}.")
    if replay is not None:
        raise ConfigError(f"algo/replay {_UNDER}. Set algo/replay=none, {_INSTEAD}.")
    if groups is not None:  # each rank of a group would draw, or score, by itself
        raise ConfigError(f"algo/groups={type(groups).__name__} {_UNDER}. Set algo/groups=none, {_INSTEAD}.")
    if win_rate_against is not None:
        raise ConfigError(f"eval.win_rate_against {_UNDER}. Set it to null, {_INSTEAD}.")
    if rewards is not None and any(isinstance(each, Classifier) for each in rewards.functions.values()):
        raise ConfigError(
            f"A reward model in this process {_UNDER}. Take reward functions without weights, {_INSTEAD}."
        )
    if generator is not None and (generator.lag or not isinstance(generator, NativeGenerator | HFGenerator)):
        lag = f" with generator.lag={generator.lag}" if generator.lag else ""
        raise ConfigError(
            f"generator={type(generator).__name__}{lag} {_UNDER}. Take generator=native or hf with lag 0, {_INSTEAD}."
        )
    if clips_by_value:
        raise ConfigError(f"trainer.gradient_clip_algorithm=value {_UNDER}. Take norm, {_INSTEAD}.")
    if optimizer is not None:
        _optimizer_fits(optimizer)


def _optimizer_fits(path: str) -> None:
    if not moves_numbers_alone(path):
        raise ConfigError(
            f"optimizer={path} is not known to move each number of a weight by itself, and strategy=fsdp_tp cuts "
            f"weights into parts. Take optimizer=adamw, {_INSTEAD}."
        )


def optimizer_fits_tensor_parallel(optimizer: Optimizer) -> None:
    """Refuse a built optimizer that depends on the shape of weights.

    Raises:
        ConfigError: names its class.
    """
    _optimizer_fits(path_of(optimizer))
