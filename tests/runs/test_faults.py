"""Real signals to real processes: whenever a run dies, the continued run equals the uninterrupted one."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import warm
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from runs_helpers import SMALL, assert_same_run, whole_step

from lit_rl.callbacks import GracefulStop
from lit_rl.cli.messages import report_errors
from lit_rl.core import signals
from lit_rl.core.signals import requeue_before_training, requeue_signal
from lit_rl.runs import train

pytestmark = pytest.mark.faults

RUN = [
    *SMALL,
    "trainer.max_steps=28",
    "algo.minibatches=2",
    "trainer.accumulate_grad_batches=2",
    "callbacks.checkpoint.every_n_train_steps=3",
]

LARGE = ["data.prompts_per_rollout=32", "algo.group_size=16", "trainer.max_steps=6", "trainer.limit_val_batches=0"]
"""Rows enough for torch to share single operations out over its threads."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory, module_process) -> Path:
    """The run that nothing interrupts."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    child = module_process(*RUN, f"run_dir={run_dir}")
    output, _ = child.communicate(timeout=300)
    assert child.returncode == 0, output
    return run_dir


def wait_for(condition, child, seconds=120.0):
    """Until the condition holds, or the process ended."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the run never came to that point"
        if child.poll() is not None:
            return
        time.sleep(0.002)


def rollouts(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("train/reward") if path.exists() else 0


@pytest.mark.all
@pytest.mark.parametrize(
    "how",
    [
        ["--rounds", "2"],
        pytest.param(["--rounds", "1", "--threads", "2", *LARGE], marks=pytest.mark.exhaustive),
        pytest.param(["--rounds", "2", "--kills", "2", "--ranks", "2", "--seed", "33"], marks=pytest.mark.exhaustive),
        pytest.param(
            ["--rounds", "2", "--kills", "2", "--engine", "--places", "engine sync"], marks=pytest.mark.exhaustive
        ),
    ],
    ids=["one process", "two threads", "two ranks", "an engine"],
)
def test_whatever_kills_a_run_it_ends_as_if_nothing_had(how, root):
    """SIGKILL in rollouts, while checkpoints and exports are written, and at random moments; of one of two ranks or
    both; while weights are sent to an engine."""
    script = [sys.executable, str(root / "scripts" / "kill_loop.py"), *how]
    # Ranks are children of rank 0, as a user's are: a forked one would not be.
    started = subprocess.run if "--ranks" in how else warm.run
    given = {"capture_output": True, "text": True} if "--ranks" in how else {}
    said = started(script, env={**os.environ, "OMP_NUM_THREADS": "1"}, **given)
    assert said.returncode == 0 and f" {how[1]} equal, 0 not." in said.stdout, said.stdout + said.stderr
    assert said.stdout.count("killed: ") == int(how[1]) and ", 0 kills" not in said.stdout
    codes = set(re.findall(r"exit code (\d+)", said.stdout))
    assert codes == {"137"} if "--ranks" not in how else "137" in codes, said.stdout
    assert "--ranks" not in how or re.search(r", rank [01]\b", said.stdout), f"none was killed alone: {said.stdout}"
    assert "--engine" not in how or re.search(r"\| engine sync \| [1-9]", said.stdout), said.stdout


@pytest.mark.all
def test_a_terminal_that_is_gone_ends_the_run_saved(root, tmp_path):
    """The kernel's own SIGHUP: nothing can be written there any more."""
    mine, its = pty.openpty()
    run_dir = tmp_path / "run"
    script = [sys.executable, str(Path(__file__).with_name("on_a_terminal.py")), str(root / "train.py")]
    child = warm.Popen(
        [*script, *RUN, "trainer.max_steps=400", f"run_dir={run_dir}"],
        stdin=its, stdout=its, stderr=its, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(its)
    said: list[bytes] = []
    threading.Thread(target=lambda: _read_all(mine, said), daemon=True).start()
    wait_for(lambda: rollouts(run_dir) >= 3, child)
    assert child.poll() is None, b"".join(said).decode()
    os.close(mine)
    child.send_signal(signal.SIGHUP)  # shells send one of their own to what they had started
    assert child.wait(60) == 128 + signal.SIGHUP
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "stopped" and whole_step(run_dir) == summary["steps"]
    assert not (run_dir / "error.json").exists()


@pytest.mark.all
def test_slurm_takes_a_job_back_and_starts_it_again(process, tmp_path, whole, monkeypatch):
    """Slurm itself is not here: its variables are, and a program of the name that it would be asked by. The signal
    comes twice, as torchrun passes on what Slurm has sent to its processes too: the run is saved all the same."""
    _stand_in_for_scontrol(tmp_path, monkeypatch)
    told = {"JOB_ID": 7, "NTASKS": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "NODELIST": "localhost", "JOB_NAME": "a"}
    for name, value in told.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    run_dir = tmp_path / "run"
    child = process(*RUN, f"run_dir={run_dir}")
    wait_for(lambda: rollouts(run_dir) >= 3, child)
    for _ in range(2):
        child.send_signal(signal.SIGUSR1)
        time.sleep(0.05)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGUSR1, output
    assert (tmp_path / "asked").read_text() == "requeue 7\n" and not list(tmp_path.rglob("hpc_ckpt*"))
    step = whole_step(run_dir)
    assert f"Stopped at step {step}, saved" in output and 0 < step < 28
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again = process(*RUN, f"run_dir={run_dir}")
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0 and "Slurm has started this job again" in output, output
    assert f"resuming {run_dir}/checkpoints/step_{step:08d}.ckpt" in output
    assert_same_run(whole, run_dir)


@pytest.mark.all
def test_a_signal_behind_the_last_step_costs_nothing_that_was_learned(process, tmp_path, monkeypatch):
    """In the last validation SIGHUP comes twice, of the kernel and of an ending shell. Then Ctrl-C, while the model is
    half written."""
    run_dir, sent = tmp_path / "run", tmp_path / "sent"
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SENT", str(sent))
    words = [*SMALL, "trainer.max_steps=2", f"run_dir={run_dir}", "ckpt_path=last"]
    words += [
        "+callbacks.sends._target_=signalling_callbacks.BehindTheLastStep",
        "allow_targets=[signalling_callbacks]",
    ]
    for where, number in (("validation", signal.SIGHUP), ("export", signal.SIGINT)):
        monkeypatch.setenv("SIGNAL", number.name)
        monkeypatch.setenv("BEHIND", where)
        child = process(*words)
        output, _ = child.communicate(timeout=120)
        assert child.wait(60) == 128 + number, output
        assert time.time() - float(sent.read_text()) < 15
        assert whole_step(run_dir) == 2 and not list(run_dir.glob("*hf*"))
        assert json.loads((run_dir / "summary.json").read_text())["status"] == "stopped"
    monkeypatch.delenv("BEHIND")
    child = process(*words)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0 and (run_dir / "hf" / "model.safetensors").exists(), output


def _fit(run_dir: Path) -> list[str]:
    words = "fit --model=SFT --model.model=tiny --data.task=lit_rl.data.tasks.AdditionText --trainer.max_steps=1"
    words += " --model.sampling.max_new_tokens=6 --data.batch_size=4"
    words += " --trainer.limit_val_batches=0 --trainer.logger=false --trainer.enable_checkpointing=false"
    return [*words.split(), "--trainer.accelerator=cpu", f"--trainer.default_root_dir={run_dir}"]


@pytest.mark.parametrize("words", [lambda run_dir: [*RUN, f"run_dir={run_dir}"], _fit], ids=["train", "fit"])
def test_slurms_signal_before_the_training_puts_the_job_into_the_queue_again(words, process, tmp_path, monkeypatch):
    """While the config is composed and libraries load, there is no folder yet. And no rank but the first asks."""
    _stand_in_for_scontrol(tmp_path, monkeypatch)
    monkeypatch.setattr(warm, "Popen", subprocess.Popen)  # one that is forked has its libraries
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run_dir = tmp_path / "run"
    children = []
    for rank in range(2):
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        children.append(process(*words(run_dir)))
    for child in children:
        status = Path(f"/proc/{child.pid}/status")
        wait_for(lambda text=status.read_text: _catches(signal.SIGUSR1, text()), child)
        child.send_signal(signal.SIGSTOP)  # while the other comes as far
    assert not run_dir.exists()
    for child in reversed(children):
        child.send_signal(signal.SIGUSR1)
        child.send_signal(signal.SIGCONT)
        output, _ = child.communicate(timeout=60)
        assert child.returncode == 128 + signal.SIGUSR1, output
        assert (tmp_path / "asked").exists() == (child is children[0])
    assert (tmp_path / "asked").read_text() == "requeue 7\n" and not run_dir.exists()


@pytest.mark.parametrize("stops", [True, False])
def test_a_fit_that_does_not_train_yet_leaves_its_folder_to_the_job_that_comes_again(
    stops, train, tmp_path, monkeypatch, handler_as_before
):
    """Without `GracefulStop` the signal is the user's own."""
    _stand_in_for_scontrol(tmp_path, monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    words = [*_fit(tmp_path / "run"), "--allow_targets=[signalling_callbacks]"]
    words += ["--trainer.callbacks+=lit_rl.callbacks.GracefulStop"] if stops else []
    told: list[int] = []
    if not stops:
        monkeypatch.setattr("signalling_callbacks.os.kill", lambda *_: told.append(_handles()))
    words += ["--trainer.callbacks+=signalling_callbacks.InTheSetup"]
    assert train(*words) == (128 + signal.SIGUSR1 if stops else 0)
    assert (tmp_path / "asked").exists() == stops and (tmp_path / "run").exists() != stops
    assert told == ([] if stops else [False])


def _handles() -> bool:
    return signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL


def test_an_exit_that_an_interrupted_import_drops_still_decides_the_exit_code(tmp_path, monkeypatch, handler_as_before):
    _stand_in_for_scontrol(tmp_path, monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    signals.requeue_before_training()

    def load() -> int:
        with contextlib.suppress(SystemExit):
            signal.raise_signal(signal.SIGUSR1)
        raise ImportError("cannot load module more than once per process")

    assert report_errors(load) == 128 + signal.SIGUSR1 and (tmp_path / "asked").exists()


@pytest.fixture
def handler_as_before(monkeypatch):
    monkeypatch.setattr(signals, "_requeued_by", None)
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_user_who_wants_no_requeue_gets_none_while_it_trains_either(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    wanted = {"plugins": [SLURMEnvironment(auto_requeue=False)], "callbacks": [GracefulStop()]}
    run = SimpleNamespace(trainer=L.Trainer(accelerator="cpu", devices=1, logger=False, **wanted))
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        requeue_before_training()
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
        with train._signals(run):  # pyright: ignore
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(("job", "asks"), [("7", signal.SIGUSR1), (None, None)])
def test_slurms_signal_counts_whoever_has_started_the_processes_of_a_job(job, asks, monkeypatch):
    """As torchrun does in a job of Slurm: Lightning then sees torchrun alone. A user's `auto_requeue=False` holds."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    environments = [TorchElasticEnvironment(), None, SLURMEnvironment(auto_requeue=False)]
    trainers = [SimpleNamespace(_accelerator_connector=SimpleNamespace(cluster_environment=e)) for e in environments]
    assert [requeue_signal(trainer) for trainer in trainers] == [asks, asks, None]


def _catches(number: int, status: str) -> bool:
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _stand_in_for_scontrol(folder: Path, monkeypatch) -> None:
    stands_in = folder / "bin" / "scontrol"
    stands_in.parent.mkdir()
    stands_in.write_text(f"#!/bin/sh\necho $* > {folder / 'asked'}\n")
    stands_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stands_in.parent}:{os.environ['PATH']}")


def _read_all(terminal: int, said: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 65536):
            said.append(piece)


@pytest.mark.all
def test_a_second_signal_ends_at_once(process, tmp_path):
    run_dir = tmp_path / "run"
    slow = ["trainer.accumulate_grad_batches=32", "callbacks.samples.print=0", "eval.limit=2"]
    child = process(*slow, f"run_dir={run_dir}")
    wait_for(lambda: list((run_dir / "samples").glob("step_*.parquet")), child)
    for _ in range(2):
        child.send_signal(signal.SIGINT)
        time.sleep(0.05)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 130, output
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "stopped"
    assert not list((run_dir / "checkpoints").glob("*.ckpt")), "nothing was saved any more"
