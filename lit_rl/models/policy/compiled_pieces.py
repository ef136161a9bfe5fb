"""The operations between the matrix products of a decoder layer, compiled (`torch.compile`) for training.

In a layer of Llama's kind these are two RMSNorms, the rotation of queries and keys, and ``act(gate) * up``. One
operator after another a norm reads and writes ten times what it must; compiled, each of them is one pass. All else
stays as it is: products, attention, caches, hooks, adapters, shards, names of weights. Whole layers are not
compiled, as a cache makes each layer a program of its own, anew for each kind of call.

Without gradient (generation, validation, references, old log-probs) a module computes as its class does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lit_rl.errors import BackendError, ConfigError
from lit_rl.models.policy.liger import ROTATION, turning_by
from lit_rl.ops.fixed_order import fixed_order

KINDS = 64
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
        own = _compiled_forward(part)
        if own is not None:
            part.forward, found = MethodType(_with_gradient(own, type(part).forward), part), True
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


def _with_gradient(own: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (own if torch.is_grad_enabled() else plain)(self, *args, **kwargs)

    return forward


def _compiled_forward(part: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that a module computes by in training; None where nothing of it is compiled."""
    plain = type(part).forward
    if "forward" in vars(part) or not hasattr(plain, "__code__"):
        return None
    if type(part).__name__.endswith("RMSNorm") and [name for name, _ in part.named_parameters()] == ["weight"]:
        return lambda self, x: compiled(plain)(self, x.flatten(0, -2)).view(x.shape)
    if _same_code(plain, _mlp):
        return _compiled_mlp
    if ROTATION in plain.__code__.co_names:
        rotation: Any = compiled(plain.__globals__[ROTATION])
        return turning_by(rotation, plain)
    return None


def _same_code(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Tell whether two functions compute the same from arguments in the same places, whatever their names."""
    first: Any = one.__code__
    second: Any = other.__code__
    return (first.co_code, first.co_names, first.co_argcount) == (second.co_code, second.co_names, second.co_argcount)


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
        function: Of numbers, modules and tensors, of which one at least is no keyword. Anything in it that cannot be
            compiled is an error.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException

    config.recompile_limit = max(config.recompile_limit, KINDS)
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
