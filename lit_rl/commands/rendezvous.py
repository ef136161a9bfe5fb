"""Where processes of a run meet that rank 0 has not started itself: those of other nodes, or all of torchrun and Slurm.

They meet before anything is loaded, say whom they wait for, and hear from rank 0 how the run stands. What is said goes
through a `TCPStore` of torch, at the address at which torch makes the process group later.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed import DistError
from torch.distributed.constants import default_pg_timeout

from lit_rl import errors
from lit_rl.commands.place import Place
from lit_rl.errors import BackendError, ConfigError
from lit_rl.loopback import is_loopback

LONGEST_WAIT = default_pg_timeout.total_seconds()
"""Seconds until a missing process is given up: torch's own timeout."""

_SAID_AFTER = (1.0, 30.0, 300.0)
"""Seconds of waiting after which a line is printed."""
_LOOK_EVERY = 0.2
"""Seconds."""
_END = b"end"
"""Mark after the last piece."""
_distributed: Any = torch.distributed


class Rendezvous:
    """All processes, met. Until all are `ready`, a process that waits for a `failed` one ends with it.

    Args:
        place: Placement of this process.
        command: The typed command.
        job: Number of the job of a sweep.
        patience: Seconds.

    Raises:
        BackendError: somebody has not come in time, or the port is taken. It names the address.
        ConfigError: two processes are the same node.
    """

    def __init__(self, place: Place, command: str, job: int = 0, patience: float = LONGEST_WAIT) -> None:
        self.place, self._command, self._patience = place, command, patience
        self._begun = False
        store = self._opened() if place.opens else self._reached()
        self._store = _distributed.PrefixStore(f"lit_rl/{place.attempt}/{job}", store)
        with self._held():
            if self._store.add(f"as/{place.rank}", 1) > 1:
                raise ConfigError(
                    f"Two processes say that they are {self._where(place.rank)}: give each machine a NODE_RANK of its "
                    f"own, of 0 to {place.nodes - 1}."
                )
            self._store.set(f"here/{place.rank}", socket.gethostname())
        if place.rank == 0:
            self._wait_for_all("here", range(1, place.size))

    # ------------------------------------------------------------------ what is said

    def tell(self, name: str, what: Mapping[str, Any]) -> None:
        """Send this to all others. Called by rank 0, once a name."""
        with self._held():
            self._store.set(name, json.dumps(what))

    def hear(self, name: str) -> dict[str, Any]:
        """Wait for a message of rank 0. Called by the others."""
        self._wait(lambda: self._store.check([name]), lambda: self._where(0))
        with self._held():
            return json.loads(self._store.get(name))

    def answer(self, what: Any) -> None:
        """Send an answer to rank 0. Called by the others, once."""
        with self._held():
            self._store.set(f"answer/{self.place.rank}", json.dumps(what))

    def answers(self) -> list[Any]:
        """Wait for the answers of the others, in the order of ranks. Called by rank 0."""
        others = range(1, self.place.size)
        self._wait_for_all("answer", others)
        with self._held():
            return [json.loads(self._store.get(f"answer/{rank}")) for rank in others]

    def shared(self, name: str, mine: Any) -> list[Any]:
        """Gather one value from every rank, in the order of ranks. Called by all, once a name."""
        with self._held():
            self._store.set(f"{name}/{self.place.rank}", json.dumps(mine))
        self._wait_for_all(name, range(self.place.size))
        with self._held():
            return [json.loads(self._store.get(f"{name}/{rank}")) for rank in range(self.place.size)]

    def send(self, pieces: Iterable[bytes], receivers: int) -> None:
        """Send bytes to this number of receivers, with no more than one piece in the store. Called by rank 0."""
        for number, piece in enumerate(itertools.chain(pieces, [_END])):
            with self._held():
                self._store.set(f"piece/{number}", piece)
            self._wait(lambda n=number: self._store.add(f"taken/{n}", 0) == receivers, lambda: "the others to take it")
            with self._held():
                self._store.delete_key(f"piece/{number}")

    def received(self) -> Iterator[bytes]:
        """Yield the pieces. Called by those receivers."""
        for number in itertools.count():
            key = f"piece/{number}"
            self._wait(lambda key=key: self._store.check([key]), lambda: self._where(0))
            with self._held():
                piece = self._store.get(key)
                self._store.add(f"taken/{number}", 1)
            if piece == _END:
                return
            yield piece

    # ------------------------------------------------------------------ whether all are well

    def ready(self) -> None:
        """Wait until all ranks have built their run. Called by all."""
        with self._held():
            self._store.set(f"ready/{self.place.rank}", b"")
        self._wait_for_all("ready", range(self.place.size))
        self._begun = True

    def failed(self, error: Exception) -> None:
        """Make the others, which would wait for this rank, end with the same error. Called by a rank that never gets
        ready."""
        if self._begun:
            return
        where = f"{self._where(self.place.rank)} ({socket.gethostname()})"
        said = [type(error).__name__, f"The run does not begin, as {where} has failed: {error}"]
        with contextlib.suppress(DistError):
            self._store.set("failed", json.dumps(said))
            if self.place.opens:  # what was said is gone with this process
                time.sleep(5 * _LOOK_EVERY)

    def _none_failed(self) -> bool:
        if self._store.check(["failed"]):
            kind, message = json.loads(self._store.get("failed"))
            raise getattr(errors, kind, BackendError)(message)
        return True

    # ------------------------------------------------------------------ how it waits

    def _opened(self) -> Any:
        port = self.place.port
        try:  # it listens at every address of this machine, and this one needs no name
            return _distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
        except DistError as error:
            raise BackendError(
                f"The processes would meet at port {port} of this machine ({socket.gethostname()}), which cannot be "
                f"opened: {_first_line(error)}. Set MASTER_PORT to one that is free, the same on every node."
            ) from error

    def _reached(self) -> Any:
        address, why = (self.place.address, self.place.port), [""]

        def answers() -> bool:
            try:
                socket.create_connection(address, timeout=5).close()
            except OSError as error:
                why[0] = f" ({error.strerror or error})"
                return False
            return True

        self._wait_until(answers, lambda: f"{self._where(0)}{why[0]}")
        with self._held():
            return _distributed.TCPStore(*address, is_master=False, wait_for_workers=False)

    def _wait_for_all(self, what: str, ranks: Iterable[int]) -> None:
        missing = list(ranks)

        def come() -> bool:
            missing[:] = [rank for rank in missing if not self._store.check([f"{what}/{rank}"])]
            return not missing

        self._wait(come, lambda: _list(self._where(rank) for rank in missing))

    def _wait(self, come: Callable[[], bool], whom: Callable[[], str]) -> None:
        self._wait_until(lambda: self._none_failed() and come(), whom)

    def _wait_until(self, come: Callable[[], bool], whom: Callable[[], str]) -> None:
        """Wait until a condition holds; print now and then which ranks are missing."""
        began, due = time.monotonic(), list(_SAID_AFTER)
        while True:
            with self._held():
                if come():
                    return
            waited = time.monotonic() - began
            if waited >= self._patience:
                raise BackendError(f"{whom()} did not come to {self._there()} in {waited:.0f} s.{self._advice()}")
            if due and waited >= due[0]:
                due.pop(0)
                self._say(whom(), waited)
            time.sleep(_LOOK_EVERY)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        try:
            yield
        except DistError as error:
            raise BackendError(
                f"{self._where(0)} is gone, where the processes of this run meet ({self._there()}): "
                f"{_first_line(error)}. What it said last is the reason."
            ) from error

    # ------------------------------------------------------------------ the words

    def _say(self, whom: str, waited: float) -> None:
        if not self.place.first_of_node:
            return
        this = (
            f"This is {self._where(self.place.rank)} of {self.place.nodes if self.place.by_hand else self.place.size}"
        )
        if waited < _SAID_AFTER[1]:
            line = f"{this}, waiting for {whom} at {self._there()}.{self._to_type()}"
        else:
            line = f"{this}, still waiting for {whom} at {self._there()} after {waited:.0f} s.{self._advice()}"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def _where(self, rank: int) -> str:
        return f"node {rank}" if self.place.by_hand else f"rank {rank}"

    def _there(self) -> str:
        return f"{self.place.address}:{self.place.port}"

    def _to_type(self) -> str:
        """Return the commands that start the other nodes, where the user has to."""
        if not self.place.by_hand or self.place.rank != 0:
            return ""
        reachable = socket.gethostname() if is_loopback(self.place.address) else self.place.address
        there = f"MASTER_ADDR={reachable} MASTER_PORT={self.place.port}"
        lines = [f"\n  {there} NODE_RANK={node} {self._command}" for node in range(1, self.place.nodes)]
        return f" Type there:{''.join(lines)}"

    def _advice(self) -> str:
        here = f"here it is {self.place.address}"
        if is_loopback(self.place.address):
            here += ", which leads every machine to itself"
        return (
            f" Where it was started: MASTER_ADDR has to be an address of node 0 that the others reach ({here}), "
            f"MASTER_PORT={self.place.port} the same on every node and open in firewalls.{self._to_type()}"
        )


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0].rstrip(".")


def _list(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
