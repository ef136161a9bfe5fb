"""Checks of precision, DeepSpeed and tensor parallelism: combinations that are not proven are refused by name.

docs/scale.md has the tables of what was tested.

Narrow weights without float32 masters could not be trained: between neighbours of bfloat16 lies 1/256 to 1/128 of a
weight, and AdamW moves a weight by about the learning rate; after 10 steps at 1e-6 in bfloat16 alone, 1.9 % of the
weights of a policy had moved. `optim.master_weights` keeps masters of bfloat16 weights on one device and with DDP;
under FSDP2 float32 shards are the masters; DeepSpeed keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_rl.algorithms.optim.master_weights import FLOAT32, moves_numbers_alone, optimizer_path
from lit_rl.algorithms.optim.optimizers import OptimizerFactory
from lit_rl.algorithms.optim.strategies import (
    FSDPTPStrategy,
    ZeROStrategy,
    check_checkpoints_are_shared,
    check_mesh,
    flattens_weights,
    shards_weights,
)
from lit_rl.core.errors import ConfigError
from lit_rl.models.kernels import check_liger_device
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.loaded_model import LoadedModel
from lit_rl.models.references import Reference
from lit_rl.models.sharding import check_sharding_plan

_OR_FSDP = "or take strategy=fsdp"


# ---------------------------------------------------------------------- in the order of a run


def check_before_loading(
    method: type,
    features: Iterable[Feature],
    model: LanguageModel,
    *,
    reference: Reference | None,
    optimizer: OptimizerFactory,
    trainer: Any,
    stage: str,
) -> None:
    """Refuse what the strategy was never proven with, or what would fail later, before anything is loaded.

    Args:
        method: The class of the method.
        features: The features that it uses.
        model: The description of the policy.
        reference: The reference; None if no term reads one.
        optimizer: The factory of the optimizer.
        trainer: The Trainer.
        stage: Lightning's stage: "fit", "validate", ...

    Raises:
        ConfigError: names the setting.
        BackendError: the strategy, or a kernel, needs a GPU.
    """
    strategy, precision = trainer.strategy, str(trainer.precision)
    clipping = trainer.gradient_clip_algorithm
    check_proven_precision(model, precision, strategy)
    check_mesh(strategy)
    if isinstance(strategy, DeepSpeedStrategy):
        check_zero_settings(model, precision, strategy)
        check_zero_clipping(clipping)
    check_proven(method, features, strategy)
    if isinstance(strategy, DeepSpeedStrategy):
        if reference is not None:
            check_zero_reference(reference, strategy)
        if stage == "fit" and trainer.num_nodes > 1:
            check_checkpoints_are_shared(trainer)
    if isinstance(strategy, FSDPTPStrategy):
        path, size = getattr(optimizer, "path", None), strategy.tp_size
        values: Any = {"precision": precision, "model": model, "clipping": clipping, "optimizer": path}
        check_tensor_parallel(stage=stage, tp_size=size, **values)
    if model.use_liger_kernel:
        check_liger_device(strategy.root_device)


def check_loaded_policy(policy: nn.Module, strategy: Strategy | None, *, trains: bool) -> None:
    """Refuse a loaded policy of which nothing is trained, or that the strategy cannot shard, by a ConfigError."""
    if trains:
        check_something_is_trained(policy)
    if isinstance(strategy, ZeROStrategy):
        check_zero_model(policy, strategy)


def check_optimizer(optimizer: Optimizer, strategy: Strategy) -> None:
    """Refuse a built optimizer that depends on the shape of weights, under a strategy that takes weights apart.

    Raises:
        ConfigError: names it.
    """
    if isinstance(strategy, DeepSpeedStrategy):
        check_zero_optimizer(optimizer)
    if isinstance(strategy, FSDPTPStrategy):
        _check_optimizer_path(optimizer_path(optimizer))


# ---------------------------------------------------------------------- what is proven


class Proven(NamedTuple):
    """Methods, and features of methods, that tests compare with one process under a strategy."""

    methods: tuple[str, ...]
    """Names of classes. A class derived from one of them is proven with it."""
    features: tuple[str, ...]
    """Names of `Feature`."""


PROVEN = {
    "DeepSpeed": Proven(
        methods=("GRPO", "RLOO", "PPO", "DPO", "SFT"),
        features=("environment", "other reference", "precomputed reference", "reward model"),
    ),
    "strategy=fsdp_tp": Proven(methods=("GRPO", "DPO", "SFT"), features=()),
}
"""The proven methods and features of each strategy. Others are refused there; a strategy that is not listed takes all.

`PolicyModule.features` names the features in use. Losses, advantages and estimators are none: they are functions of
log-probs, in which a strategy has no part.
"""

_NOT_COMPARED = "was never compared with one process under"
_NOT_IN_GROUPS = "was never compared with one process under strategy=fsdp_tp"


class Feature(NamedTuple):
    """A part of a method that calls the policy or keeps data of ranks, so that a strategy has to be proven with it."""

    name: str
    """Its name in `PROVEN`."""
    setting: str
    """The setting that turns it on."""
    instead: str
    """The setting without it, as an imperative."""


def check_proven(method: type, features: Iterable[Feature], strategy: Strategy) -> None:
    """Refuse a method, or a feature of it, that the strategy is not proven with, before weights are loaded.

    Args:
        method: The class of the method.
        features: The features that it uses.
        strategy: The strategy of the run.

    Raises:
        ConfigError: names the setting.
    """
    if isinstance(strategy, DeepSpeedStrategy):
        name = "DeepSpeed"
    elif isinstance(strategy, FSDPTPStrategy):
        name = "strategy=fsdp_tp"
    else:
        return
    proven = PROVEN[name]
    if not any(each.__name__ in proven.methods for each in method.__mro__):
        *others, last = proven.methods
        raise ConfigError(
            f"algo={method.__name__} {_NOT_COMPARED} {name}: {', '.join(others)} and {last} were. Take one of these, "
            f"{_OR_FSDP} or strategy=ddp."
        )
    for feature in features:
        if feature.name not in proven.features:
            raise ConfigError(f"{feature.setting} {_NOT_COMPARED} {name}. {feature.instead}, {_OR_FSDP}.")


# ---------------------------------------------------------------------- DeepSpeed


def check_zero_settings(model: LanguageModel, precision: str, strategy: DeepSpeedStrategy) -> None:
    """Refuse settings that DeepSpeed is not proven with, before anything is loaded.

    Raises:
        ConfigError: names the key.
        BackendError: there is no GPU.
    """
    if not isinstance(strategy, ZeROStrategy):
        raise ConfigError(
            f"trainer.strategy={type(strategy).__name__}: Lightning's own divides the loss by the micro-batches twice, "
            "and shards the weights that the policy decodes with. Set strategy=deepspeed_1, deepspeed_2 or deepspeed_3."
        )
    strategy.check_device()
    name = f"strategy=deepspeed_{strategy.stage}"
    if precision != FLOAT32:
        raise ConfigError(
            f"trainer.precision={precision}: {name} is proven in float32 only. Take "
            f"trainer.precision={FLOAT32}, {_OR_FSDP}."
        )
    if model.dtype != "float32":
        raise ConfigError(
            f"model.dtype={model.dtype}: {name} is proven with weights in float32 only. Take "
            f"model.dtype=float32, {_OR_FSDP}."
        )
    if model.quantization is not None:
        raise ConfigError(f"model.quantization={model.quantization} was never run with DeepSpeed. Take strategy=ddp.")
    for key in ("use_liger_kernel", "compile"):
        if getattr(model, key):
            raise ConfigError(f"model.{key}=true was never run with DeepSpeed. Take false, {_OR_FSDP}.")


def check_zero_clipping(algorithm: Any) -> None:
    """Refuse `trainer.gradient_clip_algorithm=value`.

    Raises:
        ConfigError: it is set.
    """
    if algorithm == "value":
        raise ConfigError(
            f"trainer.gradient_clip_algorithm=value: DeepSpeed's engine clips by the norm only. Take norm, {_OR_FSDP}."
        )


def check_zero_reference(reference: Reference, strategy: DeepSpeedStrategy) -> None:
    """Refuse a reference that follows the policy's weights under stage 3.

    Raises:
        ConfigError: names what to take.
    """
    if isinstance(strategy, ZeROStrategy) and strategy.stage == 3 and reference.moves:
        raise ConfigError(
            f"reference={type(reference).__name__} follows weights, which ZeRO stage 3 has taken apart. Take "
            f"reference=frozen_copy or strategy=deepspeed_2, {_OR_FSDP}."
        )


def check_zero_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that depends on the shape of weights: it would see one vector of parts of many weights.

    Raises:
        ConfigError: names its path.
    """
    path = optimizer_path(optimizer)
    if not moves_numbers_alone(path) and path not in _DEEPSPEED_OPTIMIZERS:
        raise ConfigError(
            f"optimizer={path} is not known to update each number of a weight by itself, but DeepSpeed passes it parts "
            f"of many weights as one vector. Set optimizer=adamw, {_OR_FSDP}."
        )


_DEEPSPEED_OPTIMIZERS = ("deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",)


def check_zero_model(policy: nn.Module, strategy: ZeROStrategy) -> None:
    """Refuse a mixture of experts under stage 3: a rank without rows for an expert would not gather it, and hang
    others.

    Raises:
        ConfigError: the policy is one.
    """
    configs = (getattr(part, "config", None) for part in policy.modules())
    experts = any(int(getattr(config, name, 0) or 0) > 1 for config in configs for name in _EXPERT_COUNTS)
    if strategy.stage == 3 and experts:
        raise ConfigError(
            "strategy=deepspeed_3 gathers the weights that a rank computes with, but in a mixture of experts ranks "
            "compute with different ones, so they would wait for each other forever. Set strategy=fsdp or "
            "strategy=deepspeed_2."
        )


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


# ---------------------------------------------------------------------- tensor parallelism


def check_tensor_parallel(
    *, stage: str, tp_size: int, precision: str, model: LanguageModel, clipping: Any, optimizer: str | None
) -> None:
    """Refuse settings that were never compared with one process, before anything is loaded.

    Args:
        stage: Lightning's stage: "fit", "validate", ...
        tp_size: Ranks of a tensor-parallel group.
        precision: The Trainer's precision.
        model: The description of the policy.
        clipping: `trainer.gradient_clip_algorithm`.
        optimizer: Dotted path of the optimizer; None where it is known only once it is built.

    Raises:
        ConfigError: names the key.
    """
    if stage == "predict":
        raise ConfigError(
            f"lit-rl predict {_NOT_IN_GROUPS}: its ranks write a file each. Take strategy=auto, {_OR_FSDP}."
        )
    settings = {
        "trainer.precision": (precision, "32-true"),
        "model.dtype": (model.dtype, "float32"),
        "model.lora": (model.lora, None),
        "model.adapter": (model.adapter, None),
        "model.quantization": (model.quantization, None),
        "model.use_liger_kernel": (model.use_liger_kernel, False),
        "model.compile": (model.compile, False),
    }
    for key, (value, allowed) in settings.items():
        if value != allowed:
            allowed_text = {None: "null", False: "false"}.get(allowed, allowed)
            raise ConfigError(f"{key}={value} {_NOT_IN_GROUPS}. Take {key}={allowed_text}, {_OR_FSDP}.")
    if isinstance(model, LoadedModel) or model.sees:
        what = "a model over images" if model.sees else "an object"
        raise ConfigError(
            f"model.name={model.name!r} is {what}, which {_NOT_IN_GROUPS}. Take a text model by name, {_OR_FSDP}."
        )
    check_sharding_plan(model.config, tp_size)
    if clipping == "value":
        raise ConfigError(f"trainer.gradient_clip_algorithm=value {_NOT_IN_GROUPS}. Take norm, {_OR_FSDP}.")
    if optimizer is not None:
        _check_optimizer_path(optimizer)


def _check_optimizer_path(path: str) -> None:
    if not moves_numbers_alone(path):
        raise ConfigError(
            f"optimizer={path} is not known to update each number of a weight by itself, but strategy=fsdp_tp cuts "
            f"weights into parts. Set optimizer=adamw, {_OR_FSDP}."
        )


# ---------------------------------------------------------------------- precision


_MIXED = "trainer.precision=bf16-mixed, which computes in bfloat16 and keeps the weights in float32"
_TRUE = "trainer.precision=bf16-true, whose weights are bfloat16 with float32 masters in the optimizer"


def check_proven_precision(model: LanguageModel, precision: str, strategy: Strategy) -> None:
    """Refuse settings that would fail in the first step, or that were never run.

    Raises:
        ConfigError: the Trainer would compute in float64, where log-probs, rewards and advantages are float32; or FSDP
            would shard a quantised base.
    """
    if model.quantization is not None and isinstance(strategy, ModelParallelStrategy | FSDPStrategy):
        raise ConfigError(
            f"model.quantization={model.quantization} was never run with FSDP, which would take apart weights that are "
            "packed. Take strategy=ddp, where each device holds the packed base, or model.quantization=null."
        )
    if precision == "64-true":
        raise ConfigError(
            "trainer.precision=64-true: log-probs, rewards and advantages are float32 here, and weights are trained in "
            "float32 or bfloat16. Allowed are 32-true, bf16-mixed, bf16-true and, on a GPU, 16-mixed."
        )


def check_images(model: LanguageModel, algorithm: str, strategy: Strategy | None, *, taken: bool) -> None:
    """Refuse settings that do not support a model over images, before any weight is loaded.

    Args:
        model: The description of a model over images.
        algorithm: The class of the method, for the message.
        strategy: The strategy; None without a Trainer.
        taken: Whether the method takes prompts with images.

    Raises:
        ConfigError: the method or the strategy does not.
    """
    what = f"model.name={model.name!r} is a model over images, and"
    if not taken:
        raise ConfigError(f"{what} {algorithm} reads prompts as text alone.")
    if strategy is not None and flattens_weights(strategy):
        raise ConfigError(f"{what} {type(strategy).__name__} is not there for it. Use strategy=ddp or strategy=fsdp.")


def check_something_is_trained(policy: nn.Module) -> None:
    """Refuse a policy without any trained weight, and explain why it has none.

    Raises:
        ConfigError: names what to pass.
    """
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [each for each in policy.modules() if isinstance(each, BaseTunerLayer)]
    if merged := [each for each in layers if each.merged]:
        raise ConfigError(
            f"The adapter of model is merged into {len(merged)} of its {len(layers)} layers, so it cannot be trained "
            "there. Call unmerge_adapter() on the PeftModel; or merge_and_unload(), and train the whole model."
        )
    if any(parameter.requires_grad for parameter in policy.parameters()):
        return
    count = sum(1 for _ in policy.parameters())
    problem = (
        f"Nothing of model is trained: all {count} parameters of the {type(policy).__name__} have requires_grad=False"
    )
    if isinstance(policy, PeftModel):
        raise ConfigError(
            f"{problem} (PeftModel.from_pretrained loads an adapter frozen). Pass "
            "PeftModel.from_pretrained(base, folder, is_trainable=True), or lit_rl.LanguageModel(name, adapter=folder)."
        )
    raise ConfigError(
        f"{problem} (a base under adapters is frozen, and stays so when they are merged into it). Call "
        "model.requires_grad_(True) to train all of it, or pass lit_rl.LanguageModel(name, lora=lit_rl.Lora(r=16)) or "
        "peft.get_peft_model(model, config)."
    )


def check_trainable_settings(model: LanguageModel, precision: str, strategy: Strategy) -> None:
    """Refuse settings with trained weights narrower than float32 and without masters, before anything is loaded.

    Raises:
        ConfigError: names the setting.
    """
    check_proven_precision(model, precision, strategy)
    if isinstance(strategy, DeepSpeedStrategy):
        check_zero_settings(model, precision, strategy)
        return
    if precision == "16-true":
        raise ConfigError(f"trainer.precision=16-true: {_explain_lost_updates(torch.float16, strategy)}")
    if precision == "bf16-true" and isinstance(strategy, FSDPStrategy):
        raise ConfigError(f"trainer.precision=bf16-true: {_explain_lost_updates(torch.bfloat16, strategy)}")
    adapts = model.lora is not None or model.adapter is not None
    dtype = getattr(torch, model.dtype, None)
    if not adapts and dtype is not None and not _has_masters(dtype, strategy):
        raise ConfigError(
            f"model.dtype={model.dtype}: {_explain_lost_updates(dtype, strategy)} Adapters are float32 with any: "
            "model.lora.r=16."
        )


def check_trainable_weights(trained: Mapping[str, Tensor], strategy: Strategy) -> None:
    """Refuse weights that are narrower than float32 and have no masters, once they are loaded.

    Args:
        trained: Trained weights by name.
        strategy: The strategy: DeepSpeed keeps float32 weights beside narrow ones; FSDP keeps none.

    Raises:
        ConfigError: names some of them.
    """
    lost = {
        name: p.dtype for name, p in trained.items() if p.is_floating_point() and not _has_masters(p.dtype, strategy)
    }
    if not lost or isinstance(strategy, DeepSpeedStrategy):
        return
    dtype = next(iter(lost.values()))
    names = ", ".join(list(lost)[:3]) + (", ..." if len(lost) > 3 else "")
    kind, why = str(dtype).removeprefix("torch."), _explain_lost_updates(dtype, strategy)
    raise ConfigError(f"Weights to be trained are {kind} ({names}): {why}")


def check_optimizer_shards(optimizer: OptimizerFactory, strategy: Strategy) -> None:
    """Refuse an optimizer that splits whole weights where ranks hold parts of them.

    Raises:
        ConfigError: names the strategy.
    """
    splits_weights = shards_weights(strategy) or isinstance(
        strategy, DeepSpeedStrategy
    )  # which joins weights, even without sharding
    if getattr(optimizer, "keeps_masters", False) and splits_weights:
        raise ConfigError(
            f"optimizer=adamw_split keeps the masters of whole weights, and {type(strategy).__name__} takes weights "
            "apart: take optimizer=adamw, or strategy=auto or ddp."
        )


def _has_masters(dtype: torch.dtype, strategy: Strategy) -> bool:
    """Tell whether small updates of weights of this type are kept; float32 is its own master."""
    if dtype == torch.bfloat16:
        return not isinstance(strategy, FSDPStrategy | ModelParallelStrategy)
    return dtype.itemsize >= 4


def _explain_lost_updates(dtype: torch.dtype, strategy: Strategy) -> str:
    """Return what would go wrong, and what to take."""
    if dtype == torch.float16:
        why = "training in float16 alone has no masters of its weights and no loss scale"
    else:
        why = f"{type(strategy).__name__} has no float32 masters of bfloat16 weights"
    take = f"Take model.dtype=float32 with {_MIXED}"
    if isinstance(strategy, FSDPStrategy):
        return f"{why}, so nearly every update would be rounded away silently. {take}; or strategy=fsdp (FSDP2)."
    return f"{why}, so nearly every update would be rounded away silently. {take}; or with {_TRUE}."
