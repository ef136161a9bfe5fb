"""`trainer.precision=bf16-true` as it is meant here: weights in bfloat16, and nothing else.

Lightning's own plugin would make bfloat16 of everything: of the frequencies by which positions are told apart (wrong by
up to 1/512), of rewards and advantages that are made while it is in force, and of the float columns of a batch.
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
    """The policy is loaded in bfloat16, as with `model.dtype=bfloat16`; autocast, inputs and default types stay."""

    precision: Any = BF16


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a processor or a GPU multiplies bfloat16 in hardware: AMX, AVX-512 BF16, Arm's BF16; Ampere or newer.

    Others emulate it, and are several times as fast in float32.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return any(known.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def made_in(checkpoint: Mapping[str, Any]) -> str:
    """The `trainer.precision` of the run that wrote it.

    One that does not name it is of an earlier version, whose default was float32; weights in bfloat16 have masters.
    """
    named = checkpoint.get("precision")
    return str(named) if named else BF16 if holds_masters(checkpoint.get("optimizer_states", ())) else FLOAT32


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
