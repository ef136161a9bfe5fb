"""Other kernels for the operations of a model's layers: Liger's, `torch.compile`'s, and sums in a fixed order.

Liger computes norms, rotary embedding and gated MLP in one operation each. By itself it changes classes and functions
of transformers, and so every model of that family that is loaded later in the process. Here one model has the
kernels: what Liger does to its modules is kept, and what it does to transformers is undone.

`torch.compile` is applied to the operations between the matrix products of a decoder layer, for training. In a layer
of Llama's kind these are two RMSNorms, the rotation of queries and keys, and ``act(gate) * up``. One operator after
another a norm reads and writes ten times what it must; compiled, each of them is one pass. All else stays as it is:
products, attention, caches, hooks, adapters, shards, names of weights. Whole layers are not compiled, as a cache
makes each layer a program of its own, anew for each kind of call. Without gradient (generation, validation,
references, old log-probs) a module computes as its class does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils import deterministic

from lit_rl.core.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_SETTINGS: Any = deterministic


@contextmanager
def fixed_order(device: torch.device) -> Iterator[None]:
    """Make backward passes on a CPU add in one order, so that equal passes give equal gradients on several threads.

    The gradient of ``x[index]`` is ``index_put_(accumulate=True)``. Where an index names a row twice, torch's threads
    add to that row in the order in which they arrive. This library takes ``index_select`` instead; the code of a model
    (transformers' mixtures of experts) or a loss from elsewhere may not. Inside this context torch runs that one kernel
    on one thread. Other devices, and runs with ``trainer.deterministic``, stay as they are.

    Args:
        device: Device of the loss.
    """
    if device.type != "cpu" or torch.get_deterministic_debug_mode():
        yield
        return
    fills = _SETTINGS.fill_uninitialized_memory
    _SETTINGS.fill_uninitialized_memory = False  # writing NaN into all new memory finds bugs, and costs time
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")
        _SETTINGS.fill_uninitialized_memory = fills


LIGER_ACTIVATIONS = {
    "gemma": "gelu_pytorch_tanh",
    "llama": "silu",
    "mistral": "silu",
    "phi3": "silu",
    "qwen2": "silu",
    "qwen3": "silu",
    "smollm3": "silu",
}
"""Families (`model_type`) with the activation that Liger's MLP has built in: a test holds each against transformers."""

ROTATION = "apply_rotary_pos_emb"
"""The function that the attention of a model of transformers calls to rotate queries and keys."""


def check_liger(name: str, config: PreTrainedConfig) -> None:
    """Refuse what has no kernels, before any weight is read.

    Args:
        name: What the model is called in messages.
        config: Its config.

    Raises:
        ConfigError: no CUDA device; another family, or another activation than that of the kernel.
        BackendError: the package is missing.
    """
    check_liger_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    family, auto_map = config.model_type, getattr(config, "auto_map", None)
    if family not in LIGER_ACTIVATIONS or auto_map:
        raise ConfigError(
            f"model.use_liger_kernel=true: {name!r} is {'code of its own' if auto_map else f'a {family} model'}, and "
            f"tested are transformers' own {', '.join(LIGER_ACTIVATIONS)}. Leave it out."
        )
    found: Any = getattr(config, "hidden_act", None)
    if found != LIGER_ACTIVATIONS[family]:
        raise ConfigError(
            f"model.use_liger_kernel=true: the MLP of {name!r} has hidden_act={found!r}, and Liger's of {family} "
            f"computes {LIGER_ACTIVATIONS[family]}. Leave it out."
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise BackendError("model.use_liger_kernel=true needs liger-kernel: pip install 'lit-rl[liger]'.")


def check_liger_device(device: torch.device) -> None:
    """Raise ConfigError for a device that the kernels do not run on."""
    if not _runs_on(device):
        raise ConfigError(
            f"model.use_liger_kernel=true: Liger's kernels run on CUDA devices, and this is {device.type}. Leave it "
            "out here, or set model.use_liger_kernel=false: the same numbers."
        )


def _runs_on(device: torch.device) -> bool:
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def use_liger_kernels(base: PreTrainedModel) -> None:
    """Let the modules of a model that `check_liger` lets through compute by Liger's kernels. Weights and names stay."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # pyright: ignore[reportMissingImports]

    family = base.config.model_type
    code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with _undone(vars(code)):
        plain = getattr(code, ROTATION)
        _apply_liger_kernel_to_instance(base, cross_entropy=False, fused_linear_cross_entropy=False)
        liger = getattr(code, ROTATION)
    for part in base.modules():
        if "forward" in vars(part):
            part.forward = MethodType(_by_device(vars(part)["forward"].__func__, type(part).forward), part)
        elif hasattr(part, "o_proj"):
            part.forward = MethodType(with_rotation(_by_device(liger, plain), type(part).forward), part)


@contextmanager
def _undone(names: dict[str, Any]) -> Iterator[None]:
    """Restore the names of a Python module at the end of the context."""
    before = dict(names)
    try:
        yield
    finally:
        names.update(before)


def _by_device(liger: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method or function of tensors: Liger's where its kernels run."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensor = next(value for value in args if isinstance(value, torch.Tensor))
        return (liger if _runs_on(tensor.device) else plain)(*args, **kwargs)

    return forward


def with_rotation(rotation: Callable[..., Any], forward: Any) -> Callable[..., Any]:
    """Return an attention's forward that rotates by another function: transformers reads it from the module's globals.

    Args:
        rotation: Function of queries, keys, cosines and sines.
        forward: Forward of the attention's class.
    """
    names = {**forward.__globals__, ROTATION: rotation, "__name__": __name__}
    turned = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    turned.__kwdefaults__ = forward.__kwdefaults__
    return turned


def computes_as_its_class(module: nn.Module) -> bool:
    """Tell whether a module's own forward, where it has one, only replaces kernels of its class's computation."""
    own = vars(module).get("forward")
    return own is None or getattr(own, "__module__", None) == __name__


RECOMPILE_LIMIT = 64
"""Kinds of arguments (type, a size of one, gradient or none) for which a function may be compiled anew."""

_HEADS: WeakSet[nn.Module] = WeakSet()


def compile_pieces(base: nn.Module) -> None:
    """Let a model compute these operations, and the softmax behind its head, by compiled code where it is trained.

    Args:
        base: A loaded model of transformers, before adapters are put into it.

    Raises:
        ConfigError: it has no such operations.
    """
    found = False
    for part in base.modules():
        forward = _compiled_forward(part)
        if forward is not None:
            part.forward, found = MethodType(forward, part), True
    if not found:
        raise ConfigError(
            f"model.compile=true: {type(base).__name__} has no RMSNorm, no gated MLP and no rotary embedding as Llama "
            "has them, which are what is compiled. Leave it out."
        )
    head = getattr(base, "get_output_embeddings", lambda: None)()
    if head is not None:
        _HEADS.add(head)


def compiler_of(head: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return the compiler of the softmax behind this head; None where it is not compiled."""
    return compiled if head in _HEADS else None


def _compiled_forward(part: nn.Module) -> Callable[..., Any] | None:
    """Return the forward of a module that computes by compiled code where there is a gradient; None where nothing of
    it is compiled."""
    plain: Any = type(part).forward
    if "forward" in vars(part) or not hasattr(plain, "__code__"):
        return None
    code, mlp = plain.__code__, _mlp.__code__
    own: Any
    if type(part).__name__.endswith("RMSNorm") and [name for name, _ in part.named_parameters()] == ["weight"]:

        def norm(self: Any, x: Tensor) -> Tensor:
            return compiled(plain)(self, x.flatten(0, -2)).view(x.shape)

        own = norm
    # The same code on arguments in the same places, whatever their names, is the same function.
    elif (code.co_code, code.co_names, code.co_argcount) == (mlp.co_code, mlp.co_names, mlp.co_argcount):
        own = _compiled_mlp
    elif ROTATION in code.co_names:
        own = with_rotation(compiled(plain.__globals__[ROTATION]), plain)
    else:
        return None

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (own if torch.is_grad_enabled() else plain)(self, *args, **kwargs)

    return forward


def _mlp(self: Any, x: Tensor) -> Tensor:
    """Return the output of the MLP of transformers' Llama, in the same code: MLPs are recognised by it."""
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _compiled_mlp(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    return self.down_proj(compiled(_gated)(self.act_fn, gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape))


def _gated(act: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled by `torch.compile`, which happens in its first call, once a process for all modules.

    Sizes are variable from that call on, so that another length, number of rows or step of a resumed run meets the same
    code.

    The call raises BackendError where no compiler is found or one fails: a C++ compiler on a CPU, Triton on a GPU.

    Args:
        function: Function of numbers, modules and tensors; at least one tensor is no keyword. Anything in it that
            cannot be compiled is an error.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException

    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    made = torch.compile(function, dynamic=True, fullgraph=True)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = next(each.device for each in args if isinstance(each, torch.Tensor))
        try:
            with fixed_order(device):  # its backward pass runs in there, and must have been made for it
                return made(*args, **kwargs)
        except (TorchDynamoException, ImportError) as error:
            first = str(error).strip().splitlines()[0]
            raise BackendError(
                f"model.compile=true: torch.compile fails on {function.__qualname__} ({type(error).__name__}: "
                f"{first}). It needs a C++ compiler on a CPU (the variable CXX names one) and Triton on a GPU. Or set "
                "model.compile=false."
            ) from error

    return call
