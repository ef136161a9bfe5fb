"""The float32 master of a bfloat16 weight, kept as the weight and 16 bits more.

The bits of the master ``m`` are those of the weight ``w`` and of a remainder ``r``, to the bit:

    w = the upper 16 bits of (bits(m) + 2^15)        m rounded to the nearest bfloat16
    r = bits(m) - 2^16 w,  in [-2^15, 2^15)          bits(m) = 2^16 w + r

so no second copy of the weight is held. A master halfway between two bfloat16 numbers goes to the one farther from
zero, where torch's own rounding takes the even one: an even weight would then have remainders from -2^15 to 2^15, one
value more than 16 bits can distinguish. A weight that is changed from outside takes its master along: the remainder
stays.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_LARGEST = 2**31 - 1 - 2**15
"""The largest bits that can be rounded: NaNs are above, such as a GPU's, whose bits are all set."""

_PART = 2**18
"""Numbers that are processed at a time: intermediate results stay in a CPU's cache."""


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master, a new tensor, of a bfloat16 weight and its int16 remainder of the same shape."""
    master = torch.empty_like(weight, dtype=torch.float32)
    for m, w, r in _parts(master, weight, remainder):
        m.copy_(w).view(torch.int32).add_(r)
    return master


def split(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write a master into its weight and remainder; the master's own values are lost."""
    for m, w, r in _parts(master, weight, remainder):
        bits = m.view(torch.int32)
        r.copy_(bits)  # the lower 16 bits, as a signed number, are the remainder
        w.view(torch.int16).copy_(bits.clamp_(max=_LARGEST).add_(2**15).bitwise_right_shift_(16))


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same numbers of each; whole tensors where these are not contiguous."""
    if all(tensor.is_contiguous() for tensor in tensors):
        size = _PART if tensors[0].device.type == "cpu" else tensors[0].numel()
        yield from zip(*(tensor.view(-1).split(max(size, 1)) for tensor in tensors), strict=True)
    else:
        yield tensors
