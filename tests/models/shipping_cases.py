"""Policies of every kind that can be shipped, and what the tests of shipping ask of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lit_rl.models import LanguageModel, Lora

QV = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
LORAS: dict[str, Lora | dict[str, Any]] = {
    "lora": Lora(r=2),
    "rslora": Lora(r=2, rslora=True),
    "dora": Lora(r=2, dora=True),
    "modules-to-save": Lora(r=2, targets=["q_proj"], modules_to_save=["down_proj"]),
    "a-block-to-save": Lora(r=2, targets=["q_proj"], modules_to_save=["mlp"]),
    # Adapters that came from elsewhere, as model.adapter takes them.
    "biases": {**QV, "bias": "lora_only"},
    "biases-of-the-adapter": {**QV, "lora_bias": True},
    "patterns": {**QV, "rank_pattern": {"v_proj": 3}, "alpha_pattern": {"q_proj": 5}},
}
UNTIED: dict[str, dict[str, Any]] = {
    "embedding": {**QV, "target_modules": ["embed_tokens", "o_proj"]},
    "head": {**QV, "target_modules": ["lm_head", "o_proj"]},
}
"""Where embedding and head are tied, an adapter on one of them splits them."""


def described(folder: Path, lora: Lora | dict[str, Any] | None, **more: Any) -> LanguageModel:
    """The model with an adapter of lit_rl's own, or with one of PEFT's that is continued."""
    if not isinstance(lora, dict):
        return LanguageModel(str(folder), lora=lora, **more)
    target = folder.with_name(f"{folder.name}-adapter")
    base: Any = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(base, LoraConfig(**lora)).save_pretrained(str(target), save_embedding_layers=False)
    return LanguageModel(str(folder), adapter=str(target), **more)


def learn(policy: nn.Module, seed: int = 3) -> None:
    """Change whatever is trained, and nothing else."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))


def state_of(policy: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}


def assert_unchanged(policy: nn.Module, before: dict[str, Tensor]) -> None:
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, before[name]), f"shipping changed {name} of the policy"


CHANGES: dict[str, Callable[[Tensor], None]] = {
    "one bit": lambda t: t.view(torch.int32)[-1, -1].bitwise_xor_(1),
    "a value that a sum would not see": lambda t: t[0, 0].mul_(1 + 2**-22),
    "two columns change places": lambda t: t.copy_(t[:, [1, 0, *range(2, t.shape[1])]]),
    "two rows change places": lambda t: t.copy_(t[[1, 0, *range(2, len(t))]]),
    "a sign": lambda t: t[1, 1].neg_(),
    "everything": lambda t: t.mul_(1.5),
}
