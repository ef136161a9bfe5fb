"""`lit-rl env`: versions, devices and optional packages, for the report of a fault."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

from lit_rl.reports.run_files import installed_version

_NEEDED = ("torch", "lightning", "transformers", "peft", "datasets", "hydra-core")


def version() -> str:
    """Return the version of lit_rl."""
    return installed_version() or "not installed as a package (found by PYTHONPATH)"


def print_environment() -> int:
    """Print the machine, the devices and the versions. No value of a variable, no path, no name of a user: it can be
    pasted into an issue."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_row("lit_rl", version())
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    table.add_row("processor", f"{len(_cores())} of {os.cpu_count()} cores, {_memory()}")
    for number, line in enumerate(_devices()):
        table.add_row("" if number else "devices", line)
    for name in _NEEDED:
        table.add_row(name, installed_version(name) or "not installed")
    for name, extra in optional().items():
        table.add_row(name, installed_version(name) or f"not installed: pip install 'lit-rl[{extra}]'")
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    hub = "not asked (HF_HUB_OFFLINE is set)" if offline else "online (set HF_HUB_OFFLINE=1 to stay offline)"
    table.add_row("model hub", hub)
    Console(highlight=False, soft_wrap=True, markup=False).print(table)
    return 0


def optional() -> dict[str, str]:
    """Return the packages of our extras, each with the smallest extra that brings it; none where we are not
    installed."""
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    for line in _requires():
        requirement = Requirement(line)
        _, _, extra = str(requirement.marker or "").partition('extra == "')
        extra = extra.rstrip('"')
        if extra and extra != "dev" and requirement.name not in (*_NEEDED, "lit-rl"):
            found.setdefault(requirement.name, extra)
    return found


def _requires() -> list[str]:
    try:
        return importlib.metadata.requires("lit-rl") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _cores() -> set[int]:
    """Return the cores that this process may use."""
    return os.sched_getaffinity(0) if sys.platform.startswith("linux") else set(range(os.cpu_count() or 1))


def _memory() -> str:
    """Return free and total main memory."""
    file = Path("/proc/meminfo")
    if not file.is_file():
        return "memory unknown"
    kib = {line.split(":")[0]: int(line.split()[1]) for line in file.read_text().splitlines()}
    return f"{kib['MemAvailable'] / 2**20:.1f} of {kib['MemTotal'] / 2**20:.1f} GiB free"


def _devices() -> list[str]:
    """Return the devices that torch sees."""
    if not installed_version("torch"):
        return ["torch is not installed"]
    import torch

    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines.append(f"cuda:{index}  {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        lines.append("mps")
    cuda = f" (torch is built for CUDA {torch.version.cuda})" if torch.version.cuda and not lines else ""
    return lines or [f"the processor alone{cuda}"]
