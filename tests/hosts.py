"""Machines of a test: network namespaces of this one on one cable, each with a name, processes and files of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_ENTER = 'hostname "$1"; mount --bind "$2" "$3"; mount --bind "$4" /etc/hosts; ulimit -c 0; cd "$3"; shift 4; exec "$@"'


@dataclass(frozen=True)
class Started:
    """A program on a host, and all that it started there."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        """On both streams, so far."""
        return self.log.read_text()

    def kill(self) -> None:
        """Each of its processes, at once, with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def code(self, seconds: float = 120) -> int:
        """Wait for its end.

        Raises:
            AssertionError: it has not ended in time; what it said so far.
        """
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.said}") from None


@dataclass(frozen=True)
class Host:
    """One machine."""

    name: str
    address: str
    space: str
    """Name of its network namespace."""
    own: Path
    """What it sees at `disk`, as it is seen from outside."""
    disk: Path
    """A path that every host has, to files that no other one sees."""
    names: Path
    """Its /etc/hosts."""
    started: list[Started] = field(default_factory=list)

    def start(self, *command: str, **environment: str) -> Started:
        """A program in the folder `disk`."""
        inside = ["sh", "-c", _ENTER, "sh", self.name, str(self.own), str(self.disk), str(self.names), *command]
        spaces = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **environment}
        log = self.own.with_name(f"{self.name}.{len(self.started)}.log")
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, *spaces, *inside],
                env={**os.environ, **settings},
                stdout=file,
                stderr=file,
            )
        self.started.append(Started(process, log))
        return self.started[-1]

    def python(self, *arguments: str, **environment: str) -> Started:
        """The same for this interpreter."""
        return self.start(sys.executable, *arguments, **environment)


@contextlib.contextmanager
def hosts(folder: Path, count: int) -> Iterator[list[Host]]:
    """`count` machines, for as long as the context lasts. Skips the test where they cannot be made.

    Args:
        folder: Where their files lie, each host's in a folder of its own.
        count: 2 or more.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("hosts are network namespaces: it takes root, and the programs ip (iproute2) and unshare")
    mark, disk, names = f"lit_rl_{os.getpid()}", folder / "disk", folder / "hosts"
    disk.mkdir()
    made = [Host(f"node{n}", f"10.11.0.{n + 1}", f"{mark}_{n}", folder / f"disk{n}", disk, names) for n in range(count)]
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in made))
    switch = f"{mark}_switch"
    with contextlib.ExitStack() as undo:
        try:
            undo.enter_context(_space(switch))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"hosts are network namespaces, and none can be made: {error.stderr}")
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host in made:
            host.own.mkdir()
            undo.enter_context(_space(host.space))
            _ip("-n", host.space, "link", "set", "lo", "up")
            _ip("-n", host.space, "link", "add", "eth0", "type", "veth", "peer", "name", host.name, "netns", switch)
            _ip("-n", switch, "link", "set", host.name, "master", "switch", "up")
            _ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.space, "link", "set", "eth0", "up")
        try:
            yield made
        finally:
            for started in (each for host in made for each in host.started):
                started.kill()


@contextlib.contextmanager
def _space(name: str) -> Iterator[None]:
    _ip("netns", "add", name)
    try:
        yield
    finally:
        _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
