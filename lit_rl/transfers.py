"""Copies between the host and a device that make the host wait as seldom as can be.

What the host reads of a device is there only once all work is done that was queued before: until then it queues no
more. So sizes and choices are read from copies in the host's memory, and numbers that are logged cross together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class HostCopy(NamedTuple):
    """What the host has of columns that lie on a device."""

    rows: Any
    """The copy."""
    of: tuple[Tensor | None, ...]
    """The columns that it is a copy of."""

    def rows_of(self, columns: Iterable[Tensor | None]) -> Any:
        """Return the copy if it is one of these columns; None where one of them was replaced since."""
        return self.rows if all(mine is theirs for mine, theirs in zip(self.of, columns, strict=True)) else None


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in the host's memory, without gradient. The host waits once for each device, however many of
    its tensors there are; a tensor that lies on the host stays as it is."""
    found = [tensor.detach() for tensor in tensors]
    for device in {tensor.device for tensor in found if tensor.device.type != "cpu"}:
        # Wide types first, so that each begins where its type may begin.
        places = [place for place, tensor in enumerate(found) if tensor.device == device]
        places.sort(key=lambda place: -found[place].element_size())
        there = [found[place].contiguous() for place in places]
        packed = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in there]).cpu()
        parts = packed.split([tensor.nbytes for tensor in there])
        for place, tensor, part in zip(places, there, parts):
            found[place] = part.view(tensor.dtype).view(tensor.shape)
    return found


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device. The host does not wait: it must not write to the tensor afterwards.

    On Apple's GPUs it does: such a copy would read memory that a tensor without another name has given back by then
    (pytorch issue 189690).
    """
    return tensor.to(device, non_blocking=device.type != "mps")
