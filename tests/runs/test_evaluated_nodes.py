"""An evaluation over a run's folder on several nodes: all read the settings of that run, or it does not begin."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
from test_rendezvous import together

from lit_rl.cli import run_settings
from lit_rl.core.errors import ConfigError
from lit_rl.runs.rendezvous import Rendezvous

RUN = {"algo": {}, "data": {}, "run_dir": "run", "task": "fit", "trainer": {}}
"""Enough of a config to be taken for a run's: nothing is built of it here."""


def two_nodes(root: Path, *words: str, cwds: tuple[Path, Path]) -> list[tuple[int, str]]:
    """Exit code and messages of both processes, each started as torchrun starts one a node, in a folder of its own.

    torchrun itself is a task of Slurm's, which numbers the nodes the other way round: without rank 0 both would wait.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 2, "MASTER_PORT": port}
    told |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": 0}
    env = (
        os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        | {name: str(each) for name, each in told.items()}
    )
    command = [sys.executable, str(root / "train.py"), *words, "trainer.accelerator=cpu", "trainer.num_nodes=2"]
    started = [
        warm.Popen(
            command,
            cwd=cwd,
            env=env | {"RANK": str(rank), "GROUP_RANK": str(rank), "SLURM_PROCID": str(1 - rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, cwd in enumerate(cwds)
    ]
    return [(process.wait(), said) for process, said in ((each, each.communicate(timeout=90)[1]) for each in started)]


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    """The current folders of two nodes."""
    folders = tmp_path / "node0", tmp_path / "node1"
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (["run", "run"], None),
        (["none", "none"], None),
        (["run", "none"], r"a run on node 0 \(.*\), and none on node 1 \(.*Every node must see the same folder"),
        (["none", "none", "run"], r"a run on node 2 \(.*\), and none on node 0 \("),
        (["run", "other"], r"another config.yaml on node [01] \(.*\) than on node [01] \("),
    ],
)
def test_all_see_the_settings_of_one_run_or_of_none(folders: list[str], words: str | None, tmp_path: Path) -> None:
    for name, steps in (("run", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(json.dumps(RUN | {"trainer": {"max_steps": steps}}))

    def sees(folder: str) -> Callable[[Rendezvous], None]:
        return lambda meeting: run_settings.check_every_node_sees(meeting, "eval", str(tmp_path / folder))

    for outcome in together(*map(sees, folders)):
        if words is None:
            assert outcome.result() is None
        else:  # the same on every node: none waits for one that has left
            with pytest.raises(ConfigError, match=words):
                outcome.result()


@pytest.mark.all
@pytest.mark.dist
def test_a_run_that_one_node_does_not_see_is_not_evaluated(root: Path, nodes: tuple[Path, Path]) -> None:
    (nodes[0] / "run").mkdir()
    (nodes[0] / "run" / "config.yaml").write_text(json.dumps(RUN))
    for code, said in two_nodes(root, "task=eval", "run_dir=run", cwds=nodes):
        assert code == 2 and "Traceback" not in said, said
        assert "run_dir=run holds the config.yaml of a run on node 0 (" in said
        assert "and none on node 1 (" in said and "Every node must see the same folder" in said
    assert [path.name for node in nodes for path in node.iterdir()] == ["run"]
    assert [path.name for path in (nodes[0] / "run").iterdir()] == ["config.yaml"]
