"""A GPU that was asked for where PyTorch can see none: told before PyTorch is loaded, where that is certain."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import sys
from pathlib import Path

from lit_rl.errors import BackendError

_GPUS = ("gpu", "cuda")
_DRIVERS = ("/proc/driver/nvidia", "/dev/dxg")
"""Paths of NVIDIA's driver: on Linux, and in WSL."""


def check(accelerator: object) -> None:
    """Refuse a GPU where there can be none: on Linux, PyTorch built without one, or built for CUDA without its driver;
    and Apple's. Any other fault is left to Lightning.

    Args:
        accelerator: `trainer.accelerator`.

    Raises:
        BackendError: as it is said when Lightning looks for one.
    """
    if sys.platform != "linux":
        return
    if accelerator == "mps" or (accelerator in _GPUS and _none_can_be_seen(_built())):
        raise no_gpu(str(accelerator))


def no_gpu(accelerator: str) -> BackendError:
    """Return the error where there is no GPU."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if seen is None or accelerator not in _GPUS else f" with CUDA_VISIBLE_DEVICES={seen!r}"
    return BackendError(
        f"trainer.accelerator={accelerator}, and PyTorch sees no GPU{hidden}: set trainer.accelerator=auto or cpu. "
        "`lit-rl env` shows what is there."
    )


def _none_can_be_seen(built: dict[str, bool]) -> bool:
    """Tell from PyTorch's build that it sees no GPU. CUDA's calls go to the driver's library, and without it there is
    no device; since PyTorch may find one that we do not (NixOS), the driver must be absent too."""
    if not {"cuda", "hip"} <= built.keys() or built["hip"]:
        return False
    there = _can_be_loaded("libcuda.so.1") or any(map(os.path.exists, _DRIVERS))
    return not built["cuda"] or not there


def _built() -> dict[str, bool]:
    """Return the device that the installed PyTorch was built for, from its `version.py`, which is not run; empty where
    that is unknown."""
    try:
        file = importlib.metadata.distribution("torch").locate_file("torch/version.py")
        text = Path(str(file)).read_text(encoding="utf-8")
    except (OSError, importlib.metadata.PackageNotFoundError):
        return {}
    lines = re.findall(r"^(cuda|hip)\b[^=\n]*= *(\S.*)$", text, re.MULTILINE)
    return {name: value.strip() != "None" for name, value in lines}


def _can_be_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
