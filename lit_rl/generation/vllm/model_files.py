"""What vLLM reads before any weight: config and tokenizer of the policy, in a folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.trunk import base_of


def write_model_files(policy: nn.Module, model: LanguageModel, folder: str | Path) -> None:
    """Write config and tokenizer of the plain model that the policy stands for; the weights are sent.

    They are the policy's own, not its files': a vocabulary that was resized, or a config that was overridden, is there.
    """
    base: Any = base_of(policy)
    config = copy.deepcopy(base.config)
    # Sharding puts a class of its own in front of the model's.
    config.architectures = [next(kind.__name__ for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))]
    if hasattr(config, "quantization_config"):  # the engine holds whole weights
        del config.quantization_config
    config.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
