"""The rendezvous of processes that rank 0 has not started itself: those of other nodes, or all of torchrun and Slurm.

`ProcessPlacement` is the rank of this process and the address where all meet, from what torchrun, Slurm or the user has
set. `Rendezvous` is a `TCPStore` at the address that torch's process group takes later: processes meet there before
anything is loaded, say whom they wait for, and hear from rank 0 how the run stands. Through it rank 0 sends the
checkpoint to nodes whose file systems are their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import socket
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed import DistError
from torch.distributed.constants import default_pg_timeout

from lit_rl.callbacks.checkpoint_io import step_of
from lit_rl.core import errors
from lit_rl.core.durable_files import MANIFEST, PARTIAL, flush, replacing
from lit_rl.core.errors import BackendError, ConfigError, StorageError
from lit_rl.core.machine import is_loopback
from lit_rl.runs.run_dir import RunDir

# ---------------------------------------------------------------------- the placement of this process


@dataclass(frozen=True)
class ProcessPlacement:
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


def device_count(devices: Any) -> int | None:
    """Return the number of devices, written as Lightning takes them; None where it depends on the machine."""
    if isinstance(devices, int | str) and str(devices).isdigit():
        return int(devices)
    if isinstance(devices, str):
        return len([each for each in devices.split(",") if each.strip()]) if "," in devices else None
    return len(devices) if isinstance(devices, Sequence) else None


def find_placement(num_nodes: int) -> ProcessPlacement | None:
    """Return the placement of this process from the launcher's variables; None where it starts all other processes
    itself, or is alone.

    Args:
        num_nodes: `trainer.num_nodes`.

    Raises:
        ConfigError: what the launcher set does not fit it, or does not say where to meet.
    """
    if TorchElasticEnvironment.detect():
        environment, rank = TorchElasticEnvironment(), int(os.environ["RANK"])
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        attempt = "/".join(os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
    elif SLURMEnvironment.detect():
        try:
            environment = SLURMEnvironment()
        except RuntimeError as error:
            raise ConfigError(str(error)) from error
        rank, attempt = environment.global_rank(), ""
        nodes = int(os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)
        opens = rank == 0
    else:
        return _manual_placement(num_nodes)
    found = ProcessPlacement(
        rank,
        environment.world_size(),
        environment.node_rank(),
        nodes,
        environment.main_address,
        environment.main_port,
        first_of_node=environment.local_rank() == 0,
        opens=opens,
        attempt=attempt,
    )
    if found.size == 1:
        return None
    if found.nodes != num_nodes:
        raise ConfigError(
            f"trainer.num_nodes={num_nodes}, and the launcher has started {found.nodes} nodes: set "
            f"trainer.num_nodes={found.nodes}."
        )
    return found


def _manual_placement(num_nodes: int) -> ProcessPlacement | None:
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
            f"This is node {node} of trainer.num_nodes={num_nodes}, and {' and '.join(lacking)} is not set: set the "
            "address of node 0, and the port that node 0 prints while it waits."
        )
    port = environment.main_port
    os.environ["MASTER_PORT"] = str(port)  # Lightning would choose another one
    return ProcessPlacement(
        node, num_nodes, node, num_nodes, environment.main_address, port, opens=node == 0, by_hand=True
    )


# ---------------------------------------------------------------------- the rendezvous


TIMEOUT = default_pg_timeout.total_seconds()
"""Seconds until a missing process is given up: torch's own timeout."""

_REPORT_AFTER = (1.0, 30.0, 300.0)
"""Seconds of waiting after which a line is printed."""

_POLL_INTERVAL = 0.2
"""Seconds."""

_END = b"end"
"""Mark after the last piece."""

_distributed: Any = torch.distributed


class Rendezvous:
    """All processes, met. Until all are ready, a process that waits for a failed one ends with it.

    Args:
        placement: Placement of this process.
        command: The typed command.
        job: Number of the job of a sweep.
        patience: Seconds to wait for the others.

    Raises:
        BackendError: somebody has not arrived in time, or the port is taken. It names the address.
        ConfigError: two processes are the same node.
    """

    def __init__(self, placement: ProcessPlacement, command: str, job: int = 0, patience: float = TIMEOUT) -> None:
        self.placement, self._command, self._patience = placement, command, patience
        self._begun = False
        store = self._open_store() if placement.opens else self._connect()
        self._store = _distributed.PrefixStore(f"lit_rl/{placement.attempt}/{job}", store)
        with self._store_errors():
            if self._store.add(f"as/{placement.rank}", 1) > 1:
                raise ConfigError(
                    f"Two processes claim to be {self._name_of(placement.rank)}: give each machine its own NODE_RANK, "
                    f"from 0 to {placement.nodes - 1}."
                )
            self._store.set(f"here/{placement.rank}", socket.gethostname())
        if placement.rank == 0:
            self._wait_for_all("here", range(1, placement.size))

    # ------------------------------------------------------------------ messages

    def broadcast(self, name: str, message: Mapping[str, Any]) -> None:
        """Send a message to all others. Called by rank 0, once a name."""
        with self._store_errors():
            self._store.set(name, json.dumps(message))

    def receive(self, name: str) -> dict[str, Any]:
        """Wait for a message of rank 0. Called by the others."""
        self._wait(lambda: self._store.check([name]), lambda: self._name_of(0))
        with self._store_errors():
            return json.loads(self._store.get(name))

    def reply(self, answer: Any) -> None:
        """Send an answer to rank 0. Called by the others, once."""
        with self._store_errors():
            self._store.set(f"answer/{self.placement.rank}", json.dumps(answer))

    def gather_replies(self) -> list[Any]:
        """Wait for the answers of the others, in the order of ranks. Called by rank 0."""
        others = range(1, self.placement.size)
        self._wait_for_all("answer", others)
        with self._store_errors():
            return [json.loads(self._store.get(f"answer/{rank}")) for rank in others]

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Gather one value from every rank, in the order of ranks. Called by all, once a name."""
        with self._store_errors():
            self._store.set(f"{name}/{self.placement.rank}", json.dumps(value))
        self._wait_for_all(name, range(self.placement.size))
        with self._store_errors():
            return [json.loads(self._store.get(f"{name}/{rank}")) for rank in range(self.placement.size)]

    def send_chunks(self, pieces: Iterable[bytes], receivers: int) -> None:
        """Send bytes to this number of receivers, with no more than one piece in the store. Called by rank 0."""
        for number, piece in enumerate(itertools.chain(pieces, [_END])):
            with self._store_errors():
                self._store.set(f"piece/{number}", piece)
            self._wait(lambda n=number: self._store.add(f"taken/{n}", 0) == receivers, lambda: "the others to take it")
            with self._store_errors():
                self._store.delete_key(f"piece/{number}")

    def receive_chunks(self) -> Iterator[bytes]:
        """Yield the pieces. Called by those receivers."""
        for number in itertools.count():
            key = f"piece/{number}"
            self._wait(lambda key=key: self._store.check([key]), lambda: self._name_of(0))
            with self._store_errors():
                piece = self._store.get(key)
                self._store.add(f"taken/{number}", 1)
            if piece == _END:
                return
            yield piece

    # ------------------------------------------------------------------ a common start

    def wait_until_ready(self) -> None:
        """Wait until all ranks have built their run. Called by all."""
        with self._store_errors():
            self._store.set(f"ready/{self.placement.rank}", b"")
        self._wait_for_all("ready", range(self.placement.size))
        self._begun = True

    def abort_others(self, error: Exception) -> None:
        """Make the others, which would wait for this rank, end with the same error. Called by a rank that never gets
        ready."""
        if self._begun:
            return
        where = f"{self._name_of(self.placement.rank)} ({socket.gethostname()})"
        message = [type(error).__name__, f"The run does not start because {where} failed: {error}"]
        with contextlib.suppress(DistError):
            self._store.set("failed", json.dumps(message))
            if self.placement.opens:  # the store is gone with this process
                time.sleep(5 * _POLL_INTERVAL)

    # ------------------------------------------------------------------ waiting

    def _open_store(self) -> Any:
        port = self.placement.port
        try:  # it listens at every address of this machine, and this one needs no name
            return _distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
        except DistError as error:
            raise BackendError(
                f"The processes would meet at port {port} of this machine ({socket.gethostname()}), which cannot be "
                f"opened: {_first_line(error)}. Set MASTER_PORT to one that is free, the same on every node."
            ) from error

    def _connect(self) -> Any:
        address, reason = (self.placement.address, self.placement.port), [""]

        def is_reachable() -> bool:
            try:
                socket.create_connection(address, timeout=5).close()
            except OSError as error:
                reason[0] = f" ({error.strerror or error})"
                return False
            return True

        self._wait_until(is_reachable, lambda: f"{self._name_of(0)}{reason[0]}")
        with self._store_errors():
            return _distributed.TCPStore(*address, is_master=False, wait_for_workers=False)

    def _wait_for_all(self, key: str, ranks: Iterable[int]) -> None:
        missing = list(ranks)

        def arrived() -> bool:
            missing[:] = [rank for rank in missing if not self._store.check([f"{key}/{rank}"])]
            return not missing

        self._wait(arrived, lambda: _list(self._name_of(rank) for rank in missing))

    def _wait(self, arrived: Callable[[], bool], awaited: Callable[[], str]) -> None:
        """Wait until a condition holds, or raise the error of a rank that never gets ready."""

        def arrived_or_aborted() -> bool:
            if self._store.check(["failed"]):
                kind, message = json.loads(self._store.get("failed"))
                raise getattr(errors, kind, BackendError)(message)
            return arrived()

        self._wait_until(arrived_or_aborted, awaited)

    def _wait_until(self, arrived: Callable[[], bool], awaited: Callable[[], str]) -> None:
        """Wait until a condition holds; print now and then which ranks are missing."""
        began, due = time.monotonic(), list(_REPORT_AFTER)
        while True:
            with self._store_errors():
                if arrived():
                    return
            waited = time.monotonic() - began
            if waited >= self._patience:
                raise BackendError(f"{awaited()} did not reach {self._address()} in {waited:.0f} s.{self._advice()}")
            if due and waited >= due[0]:
                due.pop(0)
                self._print_waiting(awaited(), waited)
            time.sleep(_POLL_INTERVAL)

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except DistError as error:
            raise BackendError(
                f"The connection to {self._name_of(0)}, where the processes of this run meet ({self._address()}), is "
                f"lost: {_first_line(error)}. The last lines that it printed say why."
            ) from error

    # ------------------------------------------------------------------ what the user reads

    def _print_waiting(self, awaited: str, waited: float) -> None:
        if not self.placement.first_of_node:
            return
        size = self.placement.nodes if self.placement.by_hand else self.placement.size
        this = f"This is {self._name_of(self.placement.rank)} of {size}"
        if waited < _REPORT_AFTER[1]:
            line = f"{this}, waiting for {awaited} at {self._address()}.{self._commands_to_type()}"
        else:
            line = f"{this}, still waiting for {awaited} at {self._address()} after {waited:.0f} s.{self._advice()}"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def _name_of(self, rank: int) -> str:
        return f"node {rank}" if self.placement.by_hand else f"rank {rank}"

    def _address(self) -> str:
        return f"{self.placement.address}:{self.placement.port}"

    def _commands_to_type(self) -> str:
        """Return the commands that start the other nodes, where the user has to."""
        if not self.placement.by_hand or self.placement.rank != 0:
            return ""
        reachable = socket.gethostname() if is_loopback(self.placement.address) else self.placement.address
        address = f"MASTER_ADDR={reachable} MASTER_PORT={self.placement.port}"
        lines = [f"\n  {address} NODE_RANK={node} {self._command}" for node in range(1, self.placement.nodes)]
        return f" Start the others with:{''.join(lines)}"

    def _advice(self) -> str:
        here = f"here it is {self.placement.address}"
        if is_loopback(self.placement.address):
            here += ", which is each machine itself"
        return (
            f" If it was started: MASTER_ADDR must be an address of node 0 that the others can reach ({here}), "
            f"MASTER_PORT={self.placement.port} the same on every node and open in firewalls.{self._commands_to_type()}"
        )


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0].rstrip(".")


def _list(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


# ---------------------------------------------------------------------- start and checkpoint, from rank 0


_CHUNK_BYTES = 4 * 2**20
"""Bytes of a file that are sent at once; a store takes 8 MiB."""


def send_start(meeting: Rendezvous, run_dir: RunDir, ckpt_path: str | None, *, newest: bool) -> None:
    """Send the start of the run, and the checkpoint to nodes that lack it. Called by rank 0.

    Args:
        meeting: All processes.
        run_dir: Folder of the run.
        ckpt_path: Checkpoint to resume from.
        newest: True if the newest checkpoint was asked for: then no node may hold a newer one.

    Raises:
        StorageError: a node holds a newer one, or lacks one that cannot be sent.
    """
    path = None if ckpt_path is None else Path(ckpt_path).absolute()
    resumed = path is not None and run_dir.summary_file.exists()
    meeting.broadcast(
        "start",
        {
            "run_dir": str(run_dir.path.absolute()),
            "ckpt_path": path and str(path),
            "mark": path and _checkpoint_digest(path),
            "summary": run_dir.read_summary() if resumed else None,
            "newest": newest,
        },
    )
    answers = meeting.gather_replies()
    lacking = [answer["host"] for answer in answers if answer["lacks"]]
    if newer := [f"{answer['host']}:{answer['newer']}" for answer in answers if answer["newer"]]:
        plan = f"node 0 would resume from {path.name}" if path is not None else "node 0 has none and would start anew"
        raise StorageError(
            f"ckpt_path=last: {plan}, and there is a newer one: {' and '.join(newer)}. If nodes do not share a file "
            "system, the run is in the folder of node 0: make the machine node 0 that was it before, or copy the "
            "folder. To resume without the newer one, remove it there."
        )
    if path is not None and path.is_dir() and lacking:
        raise StorageError(
            f"{path} is a folder with a part of each process, and {', '.join(lacking)} does not see the same files. "
            "To resume a run with strategy=deepspeed_*, all nodes must share the file system of run_dir."
        )
    if path is not None and lacking:
        with path.open("rb") as file:
            meeting.send_chunks(iter(lambda: file.read(_CHUNK_BYTES), b""), len(lacking))
    meeting.broadcast("carried", {})


def send_finished(meeting: Rendezvous) -> None:
    """Send, in place of `send_start`, that the run has finished. Called by rank 0. Returns once all others have
    received it, since the store ends with this process."""
    meeting.broadcast("start", {"finished": True})
    meeting.gather_replies()


def receive_start(meeting: Rendezvous) -> tuple[RunDir, str | None] | None:
    """Receive the folder of the run, and the checkpoint to resume from; None where the run has finished. Called by the
    other ranks.

    Raises:
        LitRLError: why the run does not begin.
    """
    start = meeting.receive("start")
    if "finished" in start:
        meeting.reply(None)
        return None
    run_dir, path = RunDir(Path(start["run_dir"])), Path(start["ckpt_path"]) if start["ckpt_path"] else None
    first, newer = meeting.placement.first_of_node, None
    lacks = first and path is not None and (not path.exists() or _checkpoint_digest(path) != start["mark"])
    if first and start["newest"]:
        newest = max(run_dir.checkpoints.glob("*.ckpt"), key=step_of, default=None)
        if newest is not None and (path is None or step_of(newest) > step_of(path)):
            newer = newest
    if first and newer is None:
        run_dir.error_file.unlink(missing_ok=True)  # of the attempt before
        if start["summary"] is not None and run_dir.read_summary() != start["summary"]:
            run_dir.path.mkdir(parents=True, exist_ok=True)
            run_dir.write_summary(start["summary"])  # it decides what is measured, which takes all processes
    meeting.reply({"host": socket.gethostname(), "lacks": lacks, "newer": newer and str(newer)})
    if lacks and path is not None:
        _write_chunks(path, meeting.receive_chunks())
    meeting.receive("carried")
    return run_dir, str(path) if path is not None else None


def _checkpoint_digest(path: Path) -> str | None:
    """Return a digest that differs between two checkpoints, without reading all of them; None where there is none."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        if path.is_dir():
            digest.update((path / MANIFEST).read_bytes())
        else:
            with zipfile.ZipFile(path) as archive:
                digest.update(repr([(part.filename, part.file_size, part.CRC) for part in archive.infolist()]).encode())
    except (OSError, zipfile.BadZipFile):
        return None
    return digest.hexdigest()


def _write_chunks(path: Path, pieces: Iterator[bytes]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, f"{path.name}{PARTIAL}{os.getpid()}") as partial:
            with partial.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
            flush(partial)
    except OSError as error:
        raise StorageError(
            f"This node ({socket.gethostname()}) lacks the checkpoint {path}, and cannot write it: {error}."
        ) from error
