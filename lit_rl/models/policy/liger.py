"""Liger's kernels in a loaded model of transformers: norms, rotary embedding and gated MLP are one operation each.

By itself Liger changes classes and functions of transformers, and so every model of that family that is loaded later in
the process. Here one model has the kernels: what Liger does to its modules is kept, and what it does to transformers is
undone. Tensors of other devices are computed as before (a reference on the CPU). Head and loss are ours whatever Liger
has for them: its head knows no entropy and no truncation.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lit_rl.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ACTIVATIONS = {
    "gemma": "gelu_pytorch_tanh",
    "llama": "silu",
    "mistral": "silu",
    "phi3": "silu",
    "qwen2": "silu",
    "qwen3": "silu",
    "smollm3": "silu",
}
"""Families (`model_type`) with the activation that Liger's MLP has built in: a test holds each against transformers."""

_COMPILED = "lit_rl.models.policy.compiled_pieces"
"""The module whose forwards compute without gradient as their class does."""

ROTATION = "apply_rotary_pos_emb"
"""The function that the attention of a model of transformers calls to rotate queries and keys."""


def check(name: str, config: PreTrainedConfig) -> None:
    """Refuse what has no kernels, before any weight is read.

    Args:
        name: What the model is called in messages.
        config: Its config.

    Raises:
        ConfigError: no CUDA device; another family, or another activation than that of the kernel.
        BackendError: the package is missing.
    """
    check_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    family, auto_map = config.model_type, getattr(config, "auto_map", None)
    if family not in ACTIVATIONS or auto_map:
        raise ConfigError(
            f"model.use_liger_kernel=true: {name!r} is {'code of its own' if auto_map else f'a {family} model'}, and "
            f"tested are transformers' own {', '.join(ACTIVATIONS)}. Leave it out."
        )
    found: Any = getattr(config, "hidden_act", None)
    if found != ACTIVATIONS[family]:
        raise ConfigError(
            f"model.use_liger_kernel=true: the MLP of {name!r} has hidden_act={found!r}, and Liger's of {family} "
            f"computes {ACTIVATIONS[family]}. Leave it out."
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise BackendError("model.use_liger_kernel=true needs liger-kernel: pip install 'lit-rl[liger]'.")


def check_device(device: torch.device) -> None:
    """Raise ConfigError for a device that the kernels do not run on."""
    if not _runs_on(device):
        raise ConfigError(
            f"model.use_liger_kernel=true: Liger's kernels run on CUDA devices, and this is {device.type}. Leave it "
            "out here, or set model.use_liger_kernel=false: the same numbers."
        )


def _runs_on(device: torch.device) -> bool:
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def use_kernels(base: PreTrainedModel) -> None:
    """Let the modules of a model that `check` lets through compute by Liger's kernels. Weights and names stay."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # pyright: ignore[reportMissingImports]

    family = base.config.model_type
    code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with _undone(vars(code)):
        plain = getattr(code, ROTATION)
        _apply_liger_kernel_to_instance(base, cross_entropy=False, fused_linear_cross_entropy=False)
        theirs = getattr(code, ROTATION)
    for part in base.modules():
        if "forward" in vars(part):
            part.forward = MethodType(_by_device(vars(part)["forward"].__func__, type(part).forward), part)
        elif hasattr(part, "o_proj"):
            part.forward = MethodType(turning_by(_by_device(theirs, plain), type(part).forward), part)


@contextmanager
def _undone(names: dict[str, Any]) -> Iterator[None]:
    """Restore the names of a Python module at the end of the context."""
    before = dict(names)
    try:
        yield
    finally:
        names.update(before)


def _by_device(theirs: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method or function of tensors: Liger's where its kernels run."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensor = next(value for value in args if isinstance(value, torch.Tensor))
        return (theirs if _runs_on(tensor.device) else plain)(*args, **kwargs)

    return forward


def turning_by(rotation: Callable[..., Any], forward: Any) -> Callable[..., Any]:
    """Return an attention's forward that rotates by another function: transformers reads it from the module's globals.

    Args:
        rotation: Of queries, keys, cosines and sines.
        forward: Of the attention's class.
    """
    names = {**forward.__globals__, ROTATION: rotation, "__name__": __name__}
    turned = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    turned.__kwdefaults__ = forward.__kwdefaults__
    return turned


def computes_as_its_class(module: nn.Module) -> bool:
    """Tell whether a module's own forward, where it has one, only replaces kernels of its class's computation."""
    own = vars(module).get("forward")
    return own is None or getattr(own, "__module__", None) in (__name__, _COMPILED)
