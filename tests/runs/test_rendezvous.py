"""Processes of several nodes meet, as threads that talk through real sockets of this machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rl.core.errors import BackendError, ConfigError, DataError, StorageError
from lit_rl.runs import rendezvous
from lit_rl.runs.rendezvous import (
    ProcessPlacement,
    Rendezvous,
    find_placement,
    receive_start,
    send_finished,
    send_start,
)
from lit_rl.runs.run_dir import RunDir


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def at(node: int, port: int, nodes: int = 2) -> ProcessPlacement:
    return ProcessPlacement(node, nodes, node, nodes, "127.0.0.1", port, opens=node == 0, by_hand=True)


def together(*parts: Callable[[Rendezvous], Any]) -> list[Future[Any]]:
    """What each node does once all have met, node 0 first; with what it returned or raised."""
    port = free_port()
    with ThreadPoolExecutor(len(parts)) as pool:
        met = [pool.submit(lambda n=n: Rendezvous(at(n, port, len(parts)), "", patience=20)) for n in range(len(parts))]
        meetings = [each.result() for each in met]  # kept until all are through: the first one holds the port
        return [pool.submit(part, meeting) for part, meeting in zip(parts, meetings)]


def checkpoint(path: Path, value: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {"w": torch.full((2_000_000,), value)}}, path)  # of two pieces
    return path


def test_a_node_that_lacks_the_checkpoint_gets_it_from_node_0_and_another_one_is_left_alone(tmp_path, monkeypatch):
    """A folder of each node's own, reached by a name that leads each of them to its own."""
    here, lacks, has = (tmp_path / name for name in "abc")
    path = checkpoint(here / "checkpoints" / "step_00000003.ckpt", 1.0)
    (here / "summary.json").write_text('{"before": {}}')
    (lacks / "checkpoints").mkdir(parents=True)
    (lacks / "error.json").write_text("{}")
    checkpoint(has / "checkpoints" / path.name, 1.0)
    inode = (has / "checkpoints" / path.name).stat().st_ino

    def other(meeting):
        monkeypatch_told(meeting, {str(here): str(lacks if meeting.placement.node == 1 else has)})
        return receive_start(meeting)

    node_0, *others = together(lambda m: send_start(m, RunDir(here), str(path), newest=True), other, other)
    assert node_0.result() is None
    for folder, taken in zip((lacks, has), others):
        there = folder / "checkpoints" / path.name
        assert taken.result() == (RunDir(folder), str(there)) and there.read_bytes() == path.read_bytes()
        assert RunDir(folder).read_summary() == {"before": {}}
    assert (has / "checkpoints" / path.name).stat().st_ino == inode and not (lacks / "error.json").exists()


def monkeypatch_told(meeting: Rendezvous, names: dict[str, str]) -> None:
    hear = meeting.receive

    def heard(name: str) -> dict[str, Any]:
        said = hear(name)
        for here, there in names.items():
            said = {k: v.replace(here, there) if k in ("run_dir", "ckpt_path") and v else v for k, v in said.items()}
        return said

    meeting.receive = heard  # type: ignore[method-assign]


def test_that_a_run_has_finished_is_heard_by_all_before_node_0_leaves():
    heard: list[str] = []

    def main(meeting):
        send_finished(meeting)
        heard.append("node 0 leaves")

    def other(meeting):
        time.sleep(0.3)  # on a busy machine
        taken = receive_start(meeting)
        heard.append("node 1 heard")
        return taken

    node_0, node_1 = together(main, other)
    assert (node_0.result(), node_1.result(), heard) == (None, None, ["node 1 heard", "node 0 leaves"])


@pytest.mark.parametrize("held", [None, 3])
def test_a_newer_checkpoint_on_another_node_is_not_passed_over(tmp_path, held):
    here, there = tmp_path / "a", tmp_path / "b"
    path = None if held is None else checkpoint(here / "checkpoints" / f"step_{held:08d}.ckpt", 1.0)
    newer = checkpoint(there / "checkpoints" / "step_00000006.ckpt", 2.0)
    (there / "summary.json").write_text("{}")

    def other(meeting):
        monkeypatch_told(meeting, {str(here): str(there)})
        return receive_start(meeting)

    def main(meeting):
        try:
            send_start(meeting, RunDir(here), path and str(path), newest=True)
        except StorageError as error:
            meeting.abort_others(error)
            raise

    for each in together(main, other):
        with pytest.raises(StorageError, match=f"{newer}.*make the machine node 0 that was it before"):
            each.result()
    assert (there / "summary.json").read_text() == "{}"


def test_a_folder_that_is_not_on_every_node_is_refused(tmp_path):
    """DeepSpeed's: each process wrote a part of it."""
    folder = tmp_path / "a" / "checkpoints" / "step_00000003.ckpt"
    folder.mkdir(parents=True)

    def other(meeting):
        monkeypatch_told(meeting, {str(tmp_path / "a"): str(tmp_path / "b")})
        return receive_start(meeting)

    def main(meeting):
        try:
            send_start(meeting, RunDir(tmp_path / "a"), str(folder), newest=True)
        except StorageError as error:
            meeting.abort_others(error)

    _, other_node = together(main, other)
    with pytest.raises(StorageError, match="all nodes must share the file system"):
        other_node.result()


def test_nobody_waits_for_one_that_has_failed():
    def fails(meeting):
        meeting.abort_others(DataError("data.path=x is not there."))

    first, _ = together(lambda meeting: meeting.wait_until_ready(), fails)
    with pytest.raises(DataError, match=r"node 1 \(.*\) failed: data.path=x is not there."):
        first.result()


def test_whom_it_waits_for_is_said_with_what_to_type_and_in_vain_it_ends(capsys, monkeypatch):
    monkeypatch.setattr(rendezvous, "_REPORT_AFTER", (0.0, 0.5))
    port = free_port()
    with pytest.raises(BackendError, match=rf"node 1 did not reach 127.0.0.1:{port} in 1 s.*firewall"):
        Rendezvous(at(0, port), "python train.py seed=1", patience=1)
    first, again = capsys.readouterr().out.split("This is ")[1:]
    there = f"MASTER_ADDR={socket.gethostname()} MASTER_PORT={port} NODE_RANK=1 python train.py seed=1\n"
    assert first == f"node 0 of 2, waiting for node 1 at 127.0.0.1:{port}. Start the others with:\n  {there}"
    assert "still waiting for node 1" in again and "is each machine itself" in again and again.endswith(there)
    with pytest.raises(BackendError, match=rf"node 0 \(Connection refused\) did not reach 127.0.0.1:{port}"):
        Rendezvous(at(1, port), "", patience=0.5)


def test_a_port_that_is_taken_and_a_number_that_two_nodes_have_are_refused():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BackendError, match=f"port {port} of this machine .* Set MASTER_PORT"):
            Rendezvous(at(0, port), "")

    def second(meeting):
        with pytest.raises(ConfigError, match="claim to be node 1"):
            Rendezvous(meeting.placement, "", patience=5)

    for each in together(lambda meeting: None, second):
        each.result()


class TestPlace:
    """Who a process is, by the variables that a launcher sets."""

    @pytest.fixture(autouse=True)
    def _bare(self, monkeypatch):
        for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)

    def test_alone_there_is_nobody_to_meet(self):
        assert find_placement(1) is None

    def test_by_hand(self, monkeypatch):
        with pytest.raises(ConfigError, match="NODE_RANK=2 with trainer.num_nodes=2"):
            monkeypatch.setenv("NODE_RANK", "2")
            find_placement(2)
        monkeypatch.setenv("NODE_RANK", "1")
        with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT is not set"):
            find_placement(2)
        monkeypatch.setenv("MASTER_ADDR", "a")
        monkeypatch.setenv("MASTER_PORT", "7")
        assert find_placement(2) == ProcessPlacement(1, 2, 1, 2, "a", 7, by_hand=True)
        monkeypatch.setenv("LOCAL_RANK", "1")  # started by the first process of its node
        assert find_placement(2) is None

    def test_slurm(self, monkeypatch):
        told = {"NTASKS": 4, "NTASKS_PER_NODE": 2, "NNODES": 2, "PROCID": 3, "LOCALID": 1, "NODEID": 1, "JOB_ID": 71234}
        for name, value in {**told, "NODELIST": "gpu[07-08]", "JOB_NAME": "x"}.items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        assert find_placement(2) == ProcessPlacement(3, 4, 1, 2, "gpu07", 16234, first_of_node=False)
        with pytest.raises(ConfigError, match="trainer.num_nodes=1, .* 2 nodes"):
            find_placement(1)
        monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
        with pytest.raises(ConfigError, match="--ntasks-per-node"):
            find_placement(2)
