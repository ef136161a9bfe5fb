"""Returned values as plain lists and numbers, whatever they came in.

Standard library only: worker processes load this file without PyTorch and NumPy, and tell arrays by what they can do.
"""

from __future__ import annotations

import copy
import math
import reprlib
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class Opaque:
    """A description of a returned value that is neither a number, nor None, nor a list of spans."""

    kind: str
    text: str
    hint: str = ""


def to_plain(returned: Any, rows: int) -> Any:
    """Return a list of `rows` plain values for a list, tuple or 1-D array; anything else as `Opaque`."""
    if _is_array(returned):
        if tuple(returned.shape) == (rows,):
            return [_element(value) for value in returned.tolist()]
        hint = " Flatten it: .reshape(-1)." if returned.ndim == 2 and 1 in returned.shape else ""
        return Opaque(type(returned).__name__, describe(returned), hint)
    if isinstance(returned, list | tuple) and len(returned) == rows:
        return [_element(value) for value in returned]
    hint = ""
    if type(returned).__name__ == "generator":
        hint = " Wrap the generator in list(...)."
    elif isinstance(returned, dict):
        hint = " Name each part as a function of its own, or use log_extra."
    return Opaque(type(returned).__name__, describe(returned), hint)


def _element(value: Any) -> Any:
    if value is None or type(value).__name__ == "Failure":
        return value
    if (number := number_of(value)) is not None:
        return number
    if isinstance(value, list | tuple) and all(
        isinstance(part, list | tuple) and len(part) in (2, 3) for part in value
    ):
        return [tuple(_element(each) for each in part) for part in value]  # turns, and spans
    return Opaque(type(value).__name__, reprlib.repr(value))


def own_copy(value: Any) -> Any:
    """Return a copy of a value that later changes do not affect: arrays and tensors as lists and numbers.

    Objects that cannot be copied, such as a lock, are returned as they are.
    """
    if _is_array(value):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [own_copy(each) for each in value]
    if isinstance(value, dict):
        return {key: own_copy(each) for key, each in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # an object of the user's may refuse in its own way
        return value


def number_of(value: Any) -> int | float | None:
    """Return a value as a number, if it is one of Python or NumPy, or a tensor without dimensions; else None."""
    if _is_array(value) and value.ndim == 0:
        value = value.item()
    if isinstance(value, int | float):
        return value
    if not isinstance(value, Real | Decimal):
        return None
    try:
        return float(value)
    except OverflowError:  # Fraction(10**400)
        return math.inf
    except ValueError:  # Decimal("sNaN")
        return math.nan


def _is_array(value: Any) -> bool:
    """Tell whether a value is a NumPy array or scalar, or a tensor, by its methods: neither package is imported
    here."""
    return hasattr(value, "ndim") and hasattr(value, "shape") and hasattr(value, "tolist")


def describe(returned: Any) -> str:
    """Describe a value: its type, its shape or length, its first three items."""
    kind = type(returned).__name__
    if _is_array(returned):
        first = returned[:3].tolist() if returned.ndim else returned.item()
        return f"a {kind} of shape {tuple(returned.shape)} starting with {reprlib.repr(first)}"
    if isinstance(returned, list | tuple):
        return f"a {kind} of {len(returned)} values starting with {reprlib.repr(list(returned[:3]))}"
    return f"{reprlib.repr(returned)} ({kind})"
