"""The memory that a process may use on its device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lit_rl.algorithms.preflight.memory import GIB

KEPT_FREE = 0.1
"""Share of the memory that plans leave free: for kernels' workspaces, fragmentation, and other processes."""

KEPT_FREE_ON_A_CPU = 0.5
"""The same share of main memory, where the C library may hold up to 1.94 times the plan (docs/hardware.md)."""

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with a container's limit and use, for both versions of control groups."""


def room(device: torch.device, *, gigabytes: float | None = None, processes: int = 1, planned: int = 0) -> int | None:
    """Return the bytes that a plan may use; None where they are not known.

    Args:
        device: The policy's device.
        gigabytes: The user's setting, in GiB, in place of the free memory.
        processes: Processes that share a CPU's memory. Each has a GPU of its own.
        planned: Bytes of tensors that are on the GPU already, and part of the plan.
    """
    if gigabytes is not None:
        return room_of(gigabytes)
    if device.type == "cuda":
        # Memory that torch has reserved without tensors is available; tensors of a reward model stay.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((torch.cuda.mem_get_info(device)[0] + unused + planned) * (1 - KEPT_FREE))
    available = available_memory() if device.type == "cpu" else None
    return None if available is None else int(available * (1 - KEPT_FREE_ON_A_CPU) / processes)


def free_of(room: int, device: torch.device, *, gigabytes: float | None = None) -> int:
    """Return the hard memory limit for a budget that `room` returned with the same arguments.

    On a CPU it is all free memory: the C library rarely holds as much again as planned. On a GPU it is the budget.
    """
    return int(room / (1 - KEPT_FREE_ON_A_CPU)) if device.type == "cpu" and gigabytes is None else room


def whole_device(device: torch.device, *, gigabytes: float | None = None) -> int | None:
    """Return the total bytes of a GPU, the basis of an engine's share; None without one.

    The user's setting takes precedence: the plan may be for another GPU.
    """
    if gigabytes is not None:
        return int(gigabytes * GIB)
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def host_room(processes: int = 1) -> int | None:
    """Return the bytes of main memory for offloading by each process of a machine; None where not known."""
    return room(torch.device("cpu"), processes=processes)


def room_of(gigabytes: float) -> int:
    """Return the bytes that a plan may use of a number of GiB."""
    return int(gigabytes * GIB * (1 - KEPT_FREE))


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the available bytes of main memory, within the container's limit; None where unknown."""
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
