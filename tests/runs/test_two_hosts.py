"""One run on two machines, which are network namespaces with file systems of their own (`hosts.py`)."""

from __future__ import annotations

import json
import re
import shlex
import time

import pytest
from hosts import ROOT, Host, Started, hosts
from runs_helpers import SMALL, assert_same_run

from lit_rl.callbacks.checkpoint_io import is_whole

pytestmark = pytest.mark.faults

RUN = [*SMALL, "algo.minibatches=2", "trainer.accelerator=cpu", "trainer.num_nodes=2"]
LONG = [
    *[*RUN, "trainer.devices=2", "data.prompts_per_rollout=8"],
    *["trainer.max_steps=24", "callbacks.checkpoint.every_n_train_steps=3", "run_dir=run"],
]
"""Of two processes on each machine."""
SHORT = [*RUN, "trainer.max_steps=2", "data.task.val_rows=0"]
BOUND = 60
"""Seconds, on a machine that is busy with other tests, until a process ends whose other one was killed."""


def torchrun(host: Host, node: int, first: Host, *words: str) -> Started:
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"]
    meet = ["--master-addr", first.address, "--master-port", "29500"]
    return host.python(*launcher, *meet, str(ROOT / "train.py"), *words)


def srun_stands_in(host: Host, node: int, *words: str) -> Started:
    """What `srun --ntasks-per-node=1 --nodes=2` sets for a task. Slurm itself is not here."""
    told = {"JOB_ID": 71234, "JOB_NAME": "x", "NODELIST": "node[0-1]", "NNODES": 2, "NTASKS": 2, "NTASKS_PER_NODE": 1}
    mine = {"PROCID": node, "NODEID": node, "LOCALID": 0}
    return host.python(
        str(ROOT / "train.py"), *words, **{f"SLURM_{name}": str(value) for name, value in {**told, **mine}.items()}
    )


def ended_well(*started: Started) -> None:
    for each in started:
        assert each.code(240) == 0, each.said


def wait_for(condition, started: Started, seconds=240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline and started.process.poll() is None, started.said
        time.sleep(0.05)


@pytest.mark.all
def test_node_0_says_what_to_type_on_the_other_machine_and_that_is_all_it_takes(tmp_path):
    """No address, no port and no run_dir is given."""
    with hosts(tmp_path, 2) as (first, second):
        main = first.python(str(ROOT / "train.py"), *SHORT)
        wait_for(lambda: "NODE_RANK=1" in main.said, main)
        assert "This is node 0 of 2, waiting for node 1 at 127.0.0.1:" in main.said
        words = shlex.split(re.search(r"^  (MASTER_ADDR=node0 .*)$", main.said, re.MULTILINE).group(1))
        variables = dict(word.split("=") for word in words[:3])
        assert words[3:5] == ["python", str(ROOT / "train.py")]
        ended_well(second.python(*words[4:], **variables), main)
        (run_dir,) = (first.own / "runs").iterdir()
        assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
        assert [path.name for path in (second.own / "runs").iterdir()] == [run_dir.name]


@pytest.mark.exhaustive
def test_the_variables_of_slurm_are_enough(tmp_path):
    with hosts(tmp_path, 2) as (first, second):
        ended_well(*(srun_stands_in(host, node, *SHORT) for node, host in enumerate((first, second))))
        (run_dir,) = (first.own / "runs").iterdir()
        assert [path.name for path in (second.own / "runs").iterdir()] == [run_dir.name]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dies", [0, 1])
def test_a_node_is_killed_and_the_run_goes_on_as_if_it_had_not_been(dies, tmp_path):
    with hosts(tmp_path, 2) as both:
        ended_well(*(torchrun(host, node, both[0], *LONG) for node, host in enumerate(both)))
        whole, run_dir = (both[0].own / "run").rename(tmp_path / "whole"), both[0].own / "run"

        started = [torchrun(host, node, both[0], *LONG) for node, host in enumerate(both)]
        wait_for(lambda: (run_dir / "checkpoints" / "step_00000006.ckpt").exists(), started[0])
        started[dies].kill()
        killed, left, survivor = time.monotonic(), started[1 - dies], both[1 - dies]
        assert left.code(BOUND) == 1, left.said  # torchrun's own
        print(f"the other node had ended {time.monotonic() - killed:.1f} s after the kill")
        assert (
            f"Another process of the run, at {both[dies].address}, has ended" in left.said
            and "ckpt_path=last" in left.said
        )
        error = json.loads((survivor.own / "run" / "error.json").read_text())
        assert (error["error"], error["exit_code"], error["host"]) == ("BackendError", 8, survivor.name)

        ended_well(*(torchrun(host, node, both[0], *LONG, "ckpt_path=last") for node, host in enumerate(both)))
        assert not list(tmp_path.glob("disk*/run/error.json"))
        assert any(is_whole(path) for path in (both[1].own / "run" / "checkpoints").iterdir())  # it was sent there
        assert_same_run(whole, run_dir)
