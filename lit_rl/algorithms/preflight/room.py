"""The memory that a process may take of its device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lit_rl.algorithms.preflight.memory import GIB

KEPT_FREE = 0.1
"""Share of the memory that no plan gives out: for kernels' workspaces, holes between tensors, and other processes."""

KEPT_FREE_ON_A_CPU = 0.5
"""The same of main memory, where the C library may hold more: up to 1.94 times what was planned (docs/hardware.md)."""

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with the limit and the use of a container, of both versions of control groups."""


def room(device: torch.device, *, gigabytes: float | None = None, processes: int = 1, planned: int = 0) -> int | None:
    """Bytes that a plan may give out; None where nothing tells them.

    Args:
        device: Where the policy is.
        gigabytes: What the user says, in GiB, in place of what is free now.
        processes: How many share a CPU's memory. Each has a GPU of its own.
        planned: Bytes of tensors that are on the GPU already, and in the plan as well.
    """
    if gigabytes is not None:
        return room_of(gigabytes)
    if device.type == "cuda":
        # What torch holds and no tensor is in can be given out; tensors of a reward model stay where they are.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((torch.cuda.mem_get_info(device)[0] + unused + planned) * (1 - KEPT_FREE))
    available = available_memory() if device.type == "cpu" else None
    return None if available is None else int(available * (1 - KEPT_FREE_ON_A_CPU) / processes)


def free_of(room: int, device: torch.device, *, gigabytes: float | None = None) -> int:
    """Bytes above which a plan cannot fit, of what `room` gives out with the same arguments.

    On a CPU that is all that is free: the C library may hold as much again as was planned, and seldom does.
    """
    return int(room / (1 - KEPT_FREE_ON_A_CPU)) if device.type == "cpu" and gigabytes is None else room


def whole_device(device: torch.device, *, gigabytes: float | None = None) -> int | None:
    """Bytes of a GPU, whoever has them: what an engine's share is a share of. None where there is none.

    With a size of memory by hand that size: the plan may be for a GPU that is not here.
    """
    if gigabytes is not None:
        return int(gigabytes * GIB)
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def host_room(processes: int = 1) -> int | None:
    """Bytes of main memory that each of the processes of a machine may fill from its GPU; None where nothing tells."""
    return room(torch.device("cpu"), processes=processes)


def room_of(gigabytes: float) -> int:
    """Bytes that a plan may give out of so many GiB."""
    return int(gigabytes * GIB * (1 - KEPT_FREE))


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that are free or can be made so, within the limit of the container; None where unknown."""
    found = []
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        lines = (line.split() for line in meminfo.read_text().splitlines())
        found += [int(words[1]) * 1024 for words in lines if words and words[0] == "MemAvailable:"]
    elif root == Path("/") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit, use in _CGROUPS:
        files = root / limit[1:], root / use[1:]
        if all(file.is_file() for file in files):
            most, used = (file.read_text().strip() for file in files)
            if most.isdigit() and used.isdigit():
                found.append(max(0, int(most) - int(used)))
    return min(found, default=None)
