"""Optimizers as values: what a config, a notebook and LightningCLI hand to an algorithm.

Each is called with the parameter groups once the policy exists. The default learning rate, 1e-6, is for full
fine-tuning of pretrained models; LoRA wants about ten times that, the shipped tiny policy five hundred times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from lit_rl.algorithms.optim.named_class import class_at
from lit_rl.algorithms.optim.split_adamw import SplitAdamW
from lit_rl.errors import BackendError, ConfigError, check_betas, in_range
from lit_rl.keywords import answered

ParamGroups = Iterable[dict[str, Any]]


class OptimizerFactory(Protocol):
    """A factory from parameter groups to an optimizer. With `keeps_masters`, that steps bfloat16 weights in float32."""

    def __call__(self, groups: ParamGroups) -> torch.optim.Optimizer: ...


_ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "base_lr"), "here it is lr="),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), "here it is betas=(0.9, 0.999)"),
    **dict.fromkeys(("adam_epsilon", "epsilon"), "here it is eps="),
    "params": "the algorithm hands the weights of its policy to it",
    **dict.fromkeys(("max_grad_norm", "clip_grad"), "it belongs to lightning.Trainer(gradient_clip_val=...)"),
    **dict.fromkeys(
        ("lr_scheduler_type", "warmup_steps", "warmup_ratio", "scheduler"),
        "it belongs to the algorithm: scheduler=lit_rl.Linear(...)",
    ),
    **dict.fromkeys(("fused", "foreach"), "torch's fused implementation is what runs"),
}
"""Names of optimizer settings in other libraries, with their place here."""


def _check(lr: float, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0, eps: float = 1e-8) -> None:
    in_range("optimizer.lr", lr, low=0, high=1, open_low=True)
    check_betas("optimizer.betas", betas)
    in_range("optimizer.weight_decay", weight_decay, low=0, open_high=True)
    in_range("optimizer.eps", eps, low=0, open_high=True)


@answered(_ELSEWHERE)
@dataclass(frozen=True)
class AdamW:
    """AdamW (1711.05101) in torch's fused implementation.

    Args:
        lr: Peak learning rate, in (0, 1].
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    path: ClassVar[str] = "torch.optim.AdamW"

    def __post_init__(self) -> None:
        _check(self.lr, self.betas, self.weight_decay, self.eps)
        object.__setattr__(self, "betas", tuple(self.betas))

    def __call__(self, groups: ParamGroups) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            groups, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=True
        )


@answered(_ELSEWHERE)
@dataclass(frozen=True)
class AdamW8bit:
    """AdamW with its moments in 8 bits (2110.02861, bitsandbytes; extra `quant`): a quarter of the state's memory.

    Args:
        lr: Peak learning rate, in (0, 1].
        betas: Decay rates of the two moments.
        weight_decay: Decoupled weight decay.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0

    path: ClassVar[str] = "bitsandbytes.optim.AdamW8bit"

    def __post_init__(self) -> None:
        _check(self.lr, self.betas, self.weight_decay)
        object.__setattr__(self, "betas", tuple(self.betas))

    def __call__(self, groups: ParamGroups) -> torch.optim.Optimizer:
        try:
            from bitsandbytes.optim import AdamW8bit as Implementation  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise BackendError(
                "optimizer=adamw_8bit needs bitsandbytes: pip install 'lit-rl[quant]', or take optimizer=adamw."
            ) from error
        return Implementation(groups, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)


@answered(_ELSEWHERE)
@dataclass(frozen=True)
class AdamWSplit:
    """AdamW with 4 bytes of state a bfloat16 weight: a 16-bit remainder, which makes it float32, and 8-bit moments.

    Args:
        lr: Peak learning rate, in (0, 1].
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    keeps_masters: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.lr, self.betas, self.weight_decay, self.eps)
        object.__setattr__(self, "betas", tuple(self.betas))

    def __call__(self, groups: ParamGroups) -> torch.optim.Optimizer:
        return SplitAdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


@answered(_ELSEWHERE)
@dataclass(frozen=True)
class ByPath:
    """Any `torch.optim.Optimizer` by its dotted path.

    Args:
        path: For example `torch.optim.SGD`, or a class of your own package.
        lr: Peak learning rate, in (0, 1].
        kwargs: Further keyword arguments of that class.
    """

    path: str
    lr: float = 1e-6
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self.lr)

    def __call__(self, groups: ParamGroups) -> torch.optim.Optimizer:
        cls: Any = class_at(self.path, "optimizer.path", torch.optim.Optimizer, dir(torch.optim))
        try:
            return cls(groups, **{"lr": self.lr, **self.kwargs})
        except TypeError as error:
            raise ConfigError(f"optimizer.kwargs={dict(self.kwargs)} do not fit {self.path}: {error}") from error
