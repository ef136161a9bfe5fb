"""Which process of a run this one is, and where all meet, by what torchrun, Slurm or the user's hand has set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lit_rl.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """The rank of this process, and the address where all processes meet."""

    rank: int
    size: int
    node: int
    nodes: int
    address: str
    port: int
    first_of_node: bool = True
    opens: bool = False
    """True if this process opens the port. torchrun opens it itself."""
    by_hand: bool = False
    """True if the user starts the other processes, and nothing else does."""
    attempt: str = ""
    """A name that differs between attempts that meet at the same port."""


def devices_of_launcher(devices: Any) -> Any:
    """Return the devices of a node that were asked for; `auto` is one for each process that torchrun started there."""
    if devices not in (None, "auto") or not TorchElasticEnvironment.detect():
        return devices
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return here if here > 1 else devices


def number_of(devices: Any) -> int | None:
    """Return the number of devices, written as Lightning takes them; None where it depends on the machine."""
    if isinstance(devices, int | str) and str(devices).isdigit():
        return int(devices)
    if isinstance(devices, str):
        return len([each for each in devices.split(",") if each.strip()]) if "," in devices else None
    return len(devices) if isinstance(devices, Sequence) else None


def place_of(num_nodes: int) -> Place | None:
    """Return the placement of this process from the launcher's variables; None where it starts all other processes
    itself, or is alone.

    Args:
        num_nodes: `trainer.num_nodes`.

    Raises:
        ConfigError: what the launcher set does not fit it, or does not say where to meet.
    """
    if TorchElasticEnvironment.detect():
        found = _of_torchrun()
    elif SLURMEnvironment.detect():
        found = _of_slurm()
    else:
        found = _by_hand(num_nodes)
    if found is None or found.size == 1:
        return None
    if found.nodes != num_nodes:
        raise ConfigError(
            f"trainer.num_nodes={num_nodes}, and the launcher has started {found.nodes} nodes: set "
            f"trainer.num_nodes={found.nodes}."
        )
    return found


def _of_torchrun() -> Place:
    environment, rank = TorchElasticEnvironment(), int(os.environ["RANK"])
    attempt = "/".join(os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
    return Place(
        rank,
        environment.world_size(),
        environment.node_rank(),
        int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        environment.main_address,
        environment.main_port,
        first_of_node=environment.local_rank() == 0,
        opens=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        attempt=attempt,
    )


def _of_slurm() -> Place:
    try:
        environment = SLURMEnvironment()
    except RuntimeError as error:
        raise ConfigError(str(error)) from error
    rank = environment.global_rank()
    nodes = int(os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)
    return Place(
        rank,
        environment.world_size(),
        environment.node_rank(),
        nodes,
        environment.main_address,
        environment.main_port,
        first_of_node=environment.local_rank() == 0,
        opens=rank == 0,
    )


def _by_hand(num_nodes: int) -> Place | None:
    """Return the placement of the first process of a node, which starts the others there."""
    environment = LightningEnvironment()
    if num_nodes <= 1 or environment.local_rank() != 0:
        return None
    node = environment.node_rank()
    if node >= num_nodes:
        raise ConfigError(f"NODE_RANK={node} with trainer.num_nodes={num_nodes}: allowed is 0 to {num_nodes - 1}.")
    lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if node > 0 and lacking:
        raise ConfigError(
            f"This is node {node} of trainer.num_nodes={num_nodes}, and {' and '.join(lacking)} is not set: it takes "
            "the address of node 0, and the port that node 0 says it waits at."
        )
    port = environment.main_port
    os.environ["MASTER_PORT"] = str(port)  # Lightning would choose another one
    return Place(node, num_nodes, node, num_nodes, environment.main_address, port, opens=node == 0, by_hand=True)
