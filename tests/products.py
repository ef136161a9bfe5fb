"""The matrix products that torch makes of a call."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Products(TorchDispatchMode):
    """Inside, the products and the widths of their results are written down."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        name = str(function).split(".")[1]
        if name in ("mm", "bmm", "addmm") and isinstance(result, Tensor):
            self._made.append((name, result.shape[-1]))
        return result

    def of_width(self, width: int) -> list[str]:
        """The names of those whose result is so wide, in turn."""
        return [name for name, found in self._made if found == width]
