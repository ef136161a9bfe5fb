"""Checks of precision: narrow weights without float32 masters could not be trained.

Between neighbours of bfloat16 lies 1/256 to 1/128 of a weight, and AdamW moves a weight by about the learning rate:
after 10 steps at 1e-6 in bfloat16 alone, 1.9 % of the weights of a policy had moved. `optim.master_weights` keeps
masters of bfloat16 weights on one device and with DDP; under FSDP2 float32 shards are the masters; DeepSpeed keeps its
own, for what `deepspeed` accepts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn

from lit_rl.algorithms.optim.optimizers import OptimizerFactory
from lit_rl.algorithms.optim.strategies import shards
from lit_rl.algorithms.preflight.deepspeed import settings_fit_zero
from lit_rl.errors import ConfigError
from lit_rl.models.policy.language_model import LanguageModel

_MIXED = "trainer.precision=bf16-mixed, which computes in bfloat16 and keeps the weights in float32"
_TRUE = "trainer.precision=bf16-true, whose weights are bfloat16 with float32 masters in the optimizer"


def refuse_unproven(model: LanguageModel, precision: str, strategy: Strategy) -> None:
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


def something_is_trained(policy: nn.Module) -> None:
    """Refuse a policy without any trained weight, and explain why it has none.

    Raises:
        ConfigError: names what to pass.
    """
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [each for each in policy.modules() if isinstance(each, BaseTunerLayer)]
    if merged := [each for each in layers if each.merged]:
        raise ConfigError(
            f"The adapter of model is merged into {len(merged)} of its {len(layers)} layers, where nothing of it is "
            "trained. Call unmerge_adapter() on the PeftModel; or merge_and_unload(), and train the whole model."
        )
    if any(parameter.requires_grad for parameter in policy.parameters()):
        return
    count = sum(1 for _ in policy.parameters())
    said = (
        f"Nothing of model is trained: all {count} parameters of the {type(policy).__name__} have requires_grad=False"
    )
    if isinstance(policy, PeftModel):
        raise ConfigError(
            f"{said} (PeftModel.from_pretrained loads an adapter frozen). Pass PeftModel.from_pretrained(base, folder, "
            "is_trainable=True), or lit_rl.LanguageModel(name, adapter=folder)."
        )
    raise ConfigError(
        f"{said} (a base under adapters is frozen, and stays so when they are merged into it). Call "
        "model.requires_grad_(True) to train all of it, or pass lit_rl.LanguageModel(name, lora=lit_rl.Lora(r=16)) or "
        "peft.get_peft_model(model, config)."
    )


def settings_can_be_trained(model: LanguageModel, precision: str, strategy: Strategy) -> None:
    """Refuse settings with trained weights narrower than float32 and without masters, before anything is loaded.

    Raises:
        ConfigError: names the setting.
    """
    refuse_unproven(model, precision, strategy)
    if isinstance(strategy, DeepSpeedStrategy):
        settings_fit_zero(model, precision, strategy)
        return
    if precision == "16-true":
        raise ConfigError(f"trainer.precision=16-true: {_lost(torch.float16, strategy)}")
    if precision == "bf16-true" and isinstance(strategy, FSDPStrategy):
        raise ConfigError(f"trainer.precision=bf16-true: {_lost(torch.bfloat16, strategy)}")
    adapts = model.lora is not None or model.adapter is not None
    dtype = getattr(torch, model.dtype, None)
    if not adapts and dtype is not None and not _has_masters(dtype, strategy):
        raise ConfigError(
            f"model.dtype={model.dtype}: {_lost(dtype, strategy)} Adapters are float32 with any: model.lora.r=16."
        )


def weights_can_be_trained(trained: Mapping[str, Tensor], strategy: Strategy) -> None:
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
    why = _lost(dtype, strategy)
    raise ConfigError(f"Weights to be trained are {_name(dtype)} ({names}): {why}")


def optimizer_fits(optimizer: OptimizerFactory, strategy: Strategy) -> None:
    """Refuse an optimizer that splits whole weights where ranks hold parts of them.

    Raises:
        ConfigError: names the strategy.
    """
    apart = shards(strategy) or isinstance(strategy, DeepSpeedStrategy)  # which joins weights, even without sharding
    if getattr(optimizer, "keeps_masters", False) and apart:
        raise ConfigError(
            f"optimizer=adamw_split keeps the masters of whole weights, and {type(strategy).__name__} takes weights "
            "apart: take optimizer=adamw, or strategy=auto or ddp."
        )


def _has_masters(dtype: torch.dtype, strategy: Strategy) -> bool:
    """Tell whether small updates of weights of this type are kept; float32 is its own master."""
    if dtype == torch.bfloat16:
        return not isinstance(strategy, FSDPStrategy | ModelParallelStrategy)
    return dtype.itemsize >= 4


def _lost(dtype: torch.dtype, strategy: Strategy) -> str:
    """Return what would go wrong, and what to take."""
    if dtype == torch.float16:
        why = "training in float16 alone has no masters of its weights and no loss scale"
    else:
        why = f"{type(strategy).__name__} has no float32 masters of bfloat16 weights"
    take = f"Take model.dtype=float32 with {_MIXED}"
    if isinstance(strategy, FSDPStrategy):
        return f"{why}, so nearly every update would be rounded away without a word. {take}; or strategy=fsdp (FSDP2)."
    return f"{why}, so nearly every update would be rounded away without a word. {take}; or with {_TRUE}."


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
