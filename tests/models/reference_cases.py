"""Policies to have references of, and what the tests of references ask of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.core.rollout import Sampling
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.forward import response_logprobs

KINDS = ("full", "fresh", "continued")
"""All weights are trained, a fresh LoRA, a LoRA that was trained before."""


def make_policy(kind: str, folder: Path, adapter: Path, **settings: Any) -> Any:
    if kind == "full":
        return LanguageModel(str(folder), **settings).load()
    policy = LanguageModel(str(folder), lora=Lora(r=2), **settings).load()
    if kind == "fresh":
        return policy
    train_a_little(policy)
    policy.save_pretrained(str(adapter))
    return LanguageModel(str(folder), adapter=str(adapter), **settings).load()


def train_a_little(policy: nn.Module, seed: int = 2, by: float = 0.2) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(by * noise.to(parameter))


def score(policy: Any, reference: Any, module: Any, completions: Any) -> Tensor:
    with torch.no_grad(), reference.scoring(policy, module) as scorer:
        return response_logprobs(scorer, completions, Sampling())


def logprobs(policy: Any, completions: Any) -> Tensor:
    """Of the policy itself, its mode as it was."""
    was_training = policy.training
    with torch.no_grad():
        found = response_logprobs(policy.eval(), completions, Sampling())
    policy.train(was_training)
    return found


def trained(module: nn.Module) -> dict[str, Tensor]:
    """The trained parameters, by name, as they are now."""
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


class Two(nn.Module):
    """A model of two trained numbers, and one that is not."""

    def __init__(self, a: float = 0.0, b: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a))
        self.b = nn.Parameter(torch.tensor([b]))
        self.fixed = nn.Parameter(torch.tensor(5.0), requires_grad=False)

    def set(self, a: float, b: float) -> None:
        with torch.no_grad():
            self.a.fill_(a)
            self.b.fill_(b)

    @property
    def numbers(self) -> tuple[float, float]:
        return self.a.item(), self.b.item()
