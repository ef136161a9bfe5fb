"""Tasks whose rows are computed, so that a first run needs no download."""

from __future__ import annotations

import random
from typing import Any, Protocol, runtime_checkable

from lit_rl.errors import ConfigError


@runtime_checkable
class Task(Protocol):
    """Anything that makes its own rows."""

    def train(self) -> list[dict[str, Any]]:
        """The training rows, in the same order at every call."""
        ...

    def val(self) -> list[dict[str, Any]]:
        """The held-out rows; no prompt of theirs is in `train()`."""
        ...


class Addition:
    """Sums of two whole numbers: `{"prompt": "17+25=", "answer": "42"}`.

    Every ordered pair of operands is a row of exactly one of the two sets. The held-out pairs depend only on the
    arguments: they are drawn with Python's own generator, so no library version changes them.

    Args:
        max_operand: Largest operand; there are `(max_operand + 1) ** 2` pairs.
        val_rows: How many pairs are held out for validation; 0 holds out none.
        seed: Seed of the draw of the held-out pairs and of the order of the rows.
    """

    def __init__(self, max_operand: int = 99, val_rows: int = 500, seed: int = 0) -> None:
        if max_operand < 0:
            raise ConfigError(f"data.task.max_operand: {max_operand} came; it must be 0 or more")
        pairs = (max_operand + 1) ** 2
        if not 0 <= val_rows < pairs:
            raise ConfigError(
                f"data.task.val_rows: {val_rows} came; it must be from 0 to {pairs - 1}, "
                f"because max_operand={max_operand} makes {pairs} pairs and training needs at least one"
            )
        self.max_operand = max_operand
        self.val_rows = val_rows
        self.seed = seed

    def train(self) -> list[dict[str, Any]]:
        """All pairs that are not held out."""
        return self._rows()[self.val_rows :]

    def val(self) -> list[dict[str, Any]]:
        """The `val_rows` held-out pairs."""
        return self._rows()[: self.val_rows]

    def _rows(self) -> list[dict[str, Any]]:
        side = self.max_operand + 1
        order = list(range(side * side))
        random.Random(self.seed).shuffle(order)
        return [{"prompt": f"{n // side}+{n % side}=", "answer": str(n // side + n % side)} for n in order]
