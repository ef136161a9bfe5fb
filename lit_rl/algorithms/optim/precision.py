"""`trainer.precision=bf16-true` as it is meant here: weights in bfloat16, and nothing else.

Lightning's own plugin would make bfloat16 of everything: of the frequencies by which positions are told apart (wrong by
up to 1/512), of rewards and advantages that are made while it is in force, and of the float columns of a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy

BF16 = "bf16-true"


class BFloat16Weights(Precision):
    """The policy is loaded in bfloat16, as with `model.dtype=bfloat16`; autocast, inputs and default types stay."""

    precision: Any = BF16


def replace_half_precision(strategy: Any) -> bool:
    """Put `BFloat16Weights` in the place of Lightning's plugin; returns whether it is in force now.

    DeepSpeed and FSDP1 have plugins of their own, which stay.
    """
    plugin = strategy.precision_plugin
    if isinstance(plugin, HalfPrecision) and plugin.precision == BF16:
        strategy.precision_plugin = BFloat16Weights()
    return isinstance(strategy.precision_plugin, BFloat16Weights)


def shard_precision(strategy: ModelParallelStrategy) -> MixedPrecisionPolicy:
    """How FSDP2 computes: under bf16-true the shards are float32, which are the masters, and what is gathered of them
    is bfloat16; gradients are summed over ranks and micro-batches in float32.
    """
    if not isinstance(strategy.precision_plugin, BFloat16Weights):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
