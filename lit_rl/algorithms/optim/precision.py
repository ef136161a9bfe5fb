"""The meaning of `trainer.precision=bf16-true`: weights in bfloat16, and nothing else.

Lightning's own plugin would make bfloat16 of everything: of the frequencies of position embeddings (wrong by up to
1/512), of rewards and advantages that are made while it is in force, and of the float columns of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy

from lit_rl.algorithms.optim.master_weights import holds_masters

BF16 = "bf16-true"
FLOAT32 = "32-true"


class BFloat16Weights(Precision):
    """A precision plugin that leaves autocast, inputs and default types; the policy is loaded in bfloat16."""

    precision: Any = BF16


def multiplies_bfloat16(device: torch.device) -> bool:
    """Tell whether a device multiplies bfloat16 in hardware: AMX, AVX-512 BF16, Arm's BF16; Ampere or newer.

    Others emulate it, and are several times as fast in float32.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return any(known.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def made_in(checkpoint: Mapping[str, Any]) -> str:
    """Return the `trainer.precision` of the run that wrote a checkpoint.

    One that does not name it is from an earlier version, whose default was float32; bfloat16 weights have masters.
    """
    named = checkpoint.get("precision")
    return str(named) if named else BF16 if holds_masters(checkpoint.get("optimizer_states", ())) else FLOAT32


def replace_half_precision(strategy: Any) -> bool:
    """Replace Lightning's plugin by `BFloat16Weights`; return whether that is in force now.

    DeepSpeed and FSDP1 have plugins of their own, which stay.
    """
    plugin = strategy.precision_plugin
    if isinstance(plugin, HalfPrecision) and plugin.precision == BF16:
        strategy.precision_plugin = BFloat16Weights()
    return isinstance(strategy.precision_plugin, BFloat16Weights)


def shard_precision(strategy: ModelParallelStrategy) -> MixedPrecisionPolicy:
    """Return FSDP2's precision policy.

    Under bf16-true the shards are float32, which are the masters, and gathered weights are bfloat16; gradients are
    summed over ranks and micro-batches in float32.
    """
    if not isinstance(strategy.precision_plugin, BFloat16Weights):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
