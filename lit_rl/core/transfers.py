"""Copies between host and device that make the host wait as rarely as possible.

A value of a device can be read on the host only once all work queued before is done, and meanwhile the host
queues no more. So sizes and choices are read from copies in the host's memory, and numbers that are logged
cross together. Rows of numbers become tensors here too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor


class HostCopy(NamedTuple):
    """Columns on a device, and the host's copies of them, by name."""

    there: Mapping[str, Tensor]
    here: Mapping[str, Tensor]


class CopiedToHost(ABC):
    """The base of a frozen dataclass of rows whose columns may lie on a device, beside copies in the host's memory.

    A class has the fields `host`, None at first, and `vision`, of which the host needs no copy.
    """

    host: HostCopy | None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device on which the columns lie."""

    @property
    @abstractmethod
    def _columns(self) -> Mapping[str, Tensor]:
        """The tensors with a row for each of the rows, by the name of their field."""

    @property
    def kept_on_host(self) -> Self | None:
        """The same rows in the host's memory, if it has a copy of these very columns."""
        if self.device.type == "cpu":
            return self
        columns = self._columns
        if self.host is None or self.host.there.keys() != columns.keys():
            return None
        same = all(columns[name] is column for name, column in self.host.there.items())
        return self._with(self.host.here) if same else None

    @property
    def on_host(self) -> Self:
        """The same rows in the host's memory, from which sizes and choices are read; without `vision`. Where it has no
        copy of them, the device is waited for."""
        if (kept := self.kept_on_host) is not None:
            return kept
        columns = self._columns
        return self._with(dict(zip(columns, to_host(list(columns.values())))))

    def with_host(self, copy: Self | None = None) -> Self:
        """Return the same, with a host copy of the columns on a device.

        The copy is dropped once a column is replaced; in-place changes of a column are not noticed.

        Args:
            copy: The same rows in the host's memory, where they are there.
        """
        if self.device.type == "cpu":
            return self
        copy = self.on_host if copy is None else copy
        return replace(cast(Any, self), host=HostCopy(self._columns, copy._columns))

    def _with(self, columns: Mapping[str, Tensor]) -> Self:
        return replace(cast(Any, self), **columns, vision=None, host=None)


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


def in_one_transfer(device: torch.device, *parts: Tensor) -> list[Tensor]:
    """Return integers and truth values, which the CPU holds, on a device: the host waits once for all of them."""
    if device.type == "cpu":
        return list(parts)
    whole = torch.cat([part.flatten().long() for part in parts]).to(device)
    pieces = zip(whole.split([part.numel() for part in parts]), parts, strict=True)
    return [piece.view(part.shape).to(part.dtype) for piece, part in pieces]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device. The host does not wait: it must not write to the tensor afterwards.

    On Apple's GPUs it does: such a copy would read memory of a temporary tensor that is already freed
    (pytorch issue 189690).
    """
    return tensor.to(device, non_blocking=device.type != "mps")


def left_pad(rows: Sequence[Sequence[Any]], fill: Any) -> tuple[Tensor, Tensor]:
    """Return rows of numbers as one tensor ``(n, longest)`` on the CPU, with `fill` before them, and the bool mask of
    what is theirs."""
    width = max(map(len, rows))
    lengths = torch.tensor([len(row) for row in rows])
    values = torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows])
    return values, torch.arange(width) >= width - lengths[:, None]


def right_pad(rows: Sequence[Sequence[Any]], fill: Any) -> tuple[Tensor, Tensor]:
    """Return the same, padded behind them."""
    width = max(map(len, rows))
    lengths = torch.tensor([len(row) for row in rows])
    values = torch.tensor([list(row) + [fill] * (width - len(row)) for row in rows])
    return values, torch.arange(width) < lengths[:, None]
