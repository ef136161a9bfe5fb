"""The files that vLLM reads before any weight: config, tokenizer and processor of the policy, in a folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.trunk import base_of


def write_model_files(policy: nn.Module, model: LanguageModel, folder: str | Path) -> None:
    """Write config, tokenizer and processor of the plain model behind the policy; the weights are sent.

    They are the policy's own, not its files': with a resized vocabulary and config overrides.
    """
    base: Any = base_of(policy)
    config = copy.deepcopy(base.config)
    # Sharding puts a class of its own in front of the model's.
    config.architectures = [next(kind.__name__ for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))]
    if hasattr(config, "quantization_config"):  # the engine holds whole weights
        del config.quantization_config
    # Some of vLLM's models over images ask the config of the text whether its head is the embedding.
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings
    config.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    if model.processor is not None:
        model.processor.processor.save_pretrained(folder)
