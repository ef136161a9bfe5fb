"""Functions of tensors compiled by `torch.compile`, each into one pass over the memory where that is possible.

Sizes are variable from the first call on, so that another length, number of rows or step of a resumed run meets the
same code. A function is compiled once a process, however many modules share it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lit_rl.errors import BackendError

KINDS = 64
"""Kinds of arguments (type, a size of one, gradient or none) for which a function may be compiled anew."""


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled, which happens in its first call.

    The call raises BackendError where no compiler is found or one fails: a C++ compiler on a CPU, Triton on a GPU.

    Args:
        function: Of tensors, numbers and modules. Anything in it that cannot be compiled is an error.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException

    config.recompile_limit = max(config.recompile_limit, KINDS)
    made = torch.compile(function, dynamic=True, fullgraph=True)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return made(*args, **kwargs)
        except (TorchDynamoException, ImportError) as error:
            first = str(error).strip().splitlines()[0]
            raise BackendError(
                f"model.compile=true: torch.compile fails on {function.__qualname__} ({type(error).__name__}: {first}). "
                "It needs a C++ compiler on a CPU (the variable CXX names one) and Triton on a GPU. Or set "
                "model.compile=false."
            ) from error

    return call
