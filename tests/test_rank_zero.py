"""Which process of a run is rank 0, by the variables of each launcher: there is exactly one. Everybody has that rule:
Lightning, where the ranks meet, and the handler of Slurm's signal before the training."""

from __future__ import annotations

import signal

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from lit_rl.core import signals
from lit_rl.core.machine import RANK_VARIABLES, is_rank_zero
from lit_rl.runs.rendezvous import find_placement

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x"}
SLURM = {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "0"}
SLURM |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NODELIST": "a,b"}


@pytest.mark.parametrize(
    ("processes", "zero"),
    [
        pytest.param([{}], 0, id="python"),
        pytest.param([{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1", "NODE_RANK": "0"}], 0, id="children of rank 0"),
        pytest.param([{}, {"NODE_RANK": "1"}, {"NODE_RANK": "1", "LOCAL_RANK": "1"}], 0, id="started by hand"),
        pytest.param([{}, {"GROUP_RANK": "1"}], 0, id="started by hand, Lightning's other name"),
        pytest.param(
            [SLURM | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)} for rank in (0, 1)], 0, id="srun python"
        ),
        pytest.param(
            [{"SLURM_PROCID": "0"}, {"SLURM_PROCID": "0", "LOCAL_RANK": "1", "NODE_RANK": "0"}],
            0,
            id="children of rank 0 in one Slurm task",
        ),
        pytest.param(
            [TORCHRUN | {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)} for rank in range(4)], 0, id="torchrun"
        ),
        # torchrun numbers nodes by their arrival, and Slurm by their names
        pytest.param(
            [
                TORCHRUN | {"RANK": "1", "LOCAL_RANK": "0", "GROUP_RANK": "1", "SLURM_PROCID": "0"},
                TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "SLURM_PROCID": "1"},
            ],
            1,
            id="srun torchrun, nodes in another order",
        ),
        pytest.param(
            [
                TORCHRUN | {"RANK": str(node * 2 + local), "LOCAL_RANK": str(local), "SLURM_PROCID": str(node)}
                for node in range(2)
                for local in range(2)
            ],
            0,
            id="srun torchrun, two processes a node",
        ),
        pytest.param([TORCHRUN | {"RANK": "0", "NODE_RANK": "1"}, TORCHRUN | {"RANK": "1"}], 0, id="a platform's node"),
        pytest.param(
            [
                SLURM | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "NODE_RANK": str(1 - rank)}
                for rank in (0, 1)
            ],
            0,
            id="srun python, with a platform's node",
        ),
        pytest.param([{"NODE_RANK": "0", "GROUP_RANK": "1"}, {"NODE_RANK": "1"}], 0, id="NODE_RANK before GROUP_RANK"),
        pytest.param([{"OMPI_COMM_WORLD_RANK": "1"}, {"OMPI_COMM_WORLD_RANK": "0"}], 1, id="mpirun"),
    ],
)
def test_one_process_of_a_run_is_rank_zero(
    processes: list[dict[str, str]], zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, asked = [], []
    monkeypatch.setattr("lit_rl.core.signals.subprocess.run", lambda command, **_: asked.append((len(found), command)))
    for variables in processes:
        with monkeypatch.context() as patch:
            for name in ("TORCHELASTIC_RUN_ID", *RANK_VARIABLES, *SLURM):
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            gets_slurms_signal_before_the_training(patch)
            found.append(is_rank_zero())
            if "OMPI_COMM_WORLD_RANK" not in variables:  # Lightning asks mpi4py
                assert (rank_of_lightning() == 0) is found[-1]
            if variables.keys() >= SLURM.keys():  # the ranks meet by the same number
                placement = find_placement(2)
                assert placement is not None and (placement.rank == 0) is found[-1]
    assert found == [number == zero for number in range(len(processes))]
    assert asked == [(zero, ["scontrol", "requeue", "7"])]


def gets_slurms_signal_before_the_training(patch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        with patch.context() as job:
            job.setenv("SLURM_JOB_ID", "7")
            signals.requeue_before_training()
            with pytest.raises(SystemExit, match=str(128 + signal.SIGUSR1)):
                signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def rank_of_lightning() -> int:
    """By the environment that its Trainer takes; without a launcher a strategy counts from node and place there."""
    kind = next((each for each in (TorchElasticEnvironment, SLURMEnvironment) if each.detect()), LightningEnvironment)
    environment = kind()
    alone = isinstance(environment, LightningEnvironment)
    return environment.node_rank() + environment.local_rank() if alone else environment.global_rank()
