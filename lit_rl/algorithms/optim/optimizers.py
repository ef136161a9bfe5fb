"""Optimizers as values: what a config, a notebook and LightningCLI hand to an algorithm.

Each is called with the parameter groups once the policy exists. The default learning rate, 1e-6, is for full
fine-tuning of pretrained models; LoRA wants about ten times that, the shipped tiny policy five hundred times.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from lit_rl.algorithms.optim.split_adamw import SplitAdamW
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import BackendError, ConfigError, check_betas, did_you_mean
from lit_rl.core.other_names import reject_unknown_keywords
from lit_rl.ops.ranges import NotNegativeFinite, Share

T = TypeVar("T")


def import_class(path: str, key: str, kind: type[T], known: Iterable[str]) -> type[T]:
    """Import the class that a setting names.

    Args:
        path: `package.module.Class`.
        key: The setting, for messages.
        kind: Required base class.
        known: Names to suggest for a mistyped one.

    Raises:
        ConfigError: nothing can be imported from there, or it is no subclass of `kind`.
    """
    module_name, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={path!r} cannot be imported ({error}).{did_you_mean(name, known)}") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        public = kind.__module__.removesuffix(".optimizer")  # the package, as users write it
        raise ConfigError(f"{key}={path!r} is {found!r}; allowed is a {public}.{kind.__name__} class.")
    return found


ParamGroups = Iterable[dict[str, Any]]


class OptimizerFactory(Protocol):
    """A factory from parameter groups to an optimizer. With `keeps_masters`, that steps bfloat16 weights in float32."""

    def __call__(self, groups: ParamGroups) -> torch.optim.Optimizer: ...


@reject_unknown_keywords("optimizer")
@checked("optimizer")
@dataclass(frozen=True)
class AdamW:
    """AdamW (1711.05101) in torch's fused implementation.

    Args:
        lr: Peak learning rate, in (0, 1].
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
    """

    lr: Share = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: NotNegativeFinite = 1e-8
    weight_decay: NotNegativeFinite = 0.0

    path: ClassVar[str] = "torch.optim.AdamW"

    def __post_init__(self) -> None:
        check_betas("optimizer.betas", self.betas)
        object.__setattr__(self, "betas", tuple(self.betas))

    def __call__(self, groups: ParamGroups) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            groups, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=True
        )


@reject_unknown_keywords("optimizer")
@checked("optimizer")
@dataclass(frozen=True)
class AdamW8bit:
    """AdamW with its moments in 8 bits (2110.02861, bitsandbytes; extra `quant`): a quarter of the state's memory.

    Args:
        lr: Peak learning rate, in (0, 1].
        betas: Decay rates of the two moments.
        weight_decay: Decoupled weight decay.
    """

    lr: Share = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: NotNegativeFinite = 0.0

    path: ClassVar[str] = "bitsandbytes.optim.AdamW8bit"

    def __post_init__(self) -> None:
        check_betas("optimizer.betas", self.betas)
        object.__setattr__(self, "betas", tuple(self.betas))

    def __call__(self, groups: ParamGroups) -> torch.optim.Optimizer:
        try:
            from bitsandbytes.optim import AdamW8bit as Implementation  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise BackendError(
                "optimizer=adamw_8bit needs bitsandbytes: pip install 'lit-rl[quant]', or take optimizer=adamw."
            ) from error
        return Implementation(groups, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)


@reject_unknown_keywords("optimizer")
@checked("optimizer")
@dataclass(frozen=True)
class AdamWSplit:
    """AdamW with 4 bytes of state a bfloat16 weight: a 16-bit remainder, which makes it float32, and 8-bit moments.

    Args:
        lr: Peak learning rate, in (0, 1].
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
    """

    lr: Share = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: NotNegativeFinite = 1e-8
    weight_decay: NotNegativeFinite = 0.0

    keeps_masters: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_betas("optimizer.betas", self.betas)
        object.__setattr__(self, "betas", tuple(self.betas))

    def __call__(self, groups: ParamGroups) -> torch.optim.Optimizer:
        return SplitAdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


@reject_unknown_keywords("optimizer")
@checked("optimizer")
@dataclass(frozen=True)
class ByPath:
    """Any `torch.optim.Optimizer` by its dotted path.

    Args:
        path: For example `torch.optim.SGD`, or a class of your own package.
        lr: Peak learning rate, in (0, 1].
        kwargs: Further keyword arguments of that class.
    """

    path: str
    lr: Share = 1e-6
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, groups: ParamGroups) -> torch.optim.Optimizer:
        cls: Any = import_class(self.path, "optimizer.path", torch.optim.Optimizer, dir(torch.optim))
        try:
            return cls(groups, **{"lr": self.lr, **self.kwargs})
        except TypeError as error:
            raise ConfigError(f"optimizer.kwargs={dict(self.kwargs)} do not fit {self.path}: {error}") from error
