"""Faults of one rank of two, in real processes: both end, what was learned is saved, and the first to fail is heard."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm
from dist_equal import end_group
from runs_helpers import SMALL, assert_same_run, newest, whole_step

from lit_rl.cli.messages import has_lost_another, one_has_ended
from lit_rl.core.errors import BackendError, StorageError
from lit_rl.runs import rank_processes
from lit_rl.runs.rank_processes import STARTED_BY, end_children, wait_for_children, watching_children
from lit_rl.runs.run_lock import LOCK_FILE, RunLock

pytestmark = [pytest.mark.faults, pytest.mark.dist, pytest.mark.all]

TWO = [
    *(*SMALL, "trainer.accelerator=cpu", "strategy=ddp", "trainer.devices=2", "trainer.limit_val_batches=0"),
    *("trainer.max_steps=400", "algo.minibatches=2", "callbacks.checkpoint.every_n_train_steps=1"),
]


AT_ONCE = 30.0
"""Seconds from a signal, or a fault, to the end of all processes, on a busy machine."""


class Launcher:
    """What Lightning's launchers have: the processes that they started, by two different classes."""

    def __init__(self) -> None:
        self.spawned = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
        self.started = subprocess.Popen(["sleep", "60"])
        self.procs = [self.spawned, self.started]


def test_processes_that_a_launcher_spawns_are_its_own_and_those_that_it_starts_are_ended() -> None:
    launcher = Launcher()
    wait_for_children(launcher, 0.1)
    assert launcher.started.poll() is None
    end_children(launcher, 0.1)
    assert launcher.started.poll() == -signal.SIGKILL and launcher.spawned.exitcode is None


def test_no_rank_is_left_when_a_test_is_over() -> None:
    """Nor where rank 0, which has started the others, has ended itself."""
    words = ["sh", "-c", "(sleep 30; echo left) &"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.wait() == 0 and child.stdout is not None
        end_group(child)
        assert child.stdout.read() == ""


def test_a_job_of_a_sweep_whose_other_ranks_an_earlier_job_has_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for them where the ranks meet; and what has ended with that job is no fault of a later one."""
    monkeypatch.setattr(rank_processes, "_children", [])
    monkeypatch.setattr(rank_processes, "_ended_children", [])
    launcher, later = Launcher(), SimpleNamespace(strategy=SimpleNamespace(launcher=None), world_size=2)
    rank_processes._children.append(launcher.started)
    end_children(launcher, 0.1)
    assert rank_processes._first_failed() is None
    with pytest.raises(BackendError, match="ended with an earlier job"), watching_children(later, lambda _: 8):  # pyright: ignore
        pass


def test_how_another_rank_ended_is_asked_of_those_that_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that a signal killed before others, which have heard of it."""
    fails, lives = subprocess.Popen(["false"]), subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(rank_processes, "_children", [fails])
    ended = f"(process {fails.pid}) has ended with exit code 1"
    assert rank_processes.child_exit_reason(4, 60.0) == (f"Rank 5 {ended}", False)
    said = str(one_has_ended(*(f"Rank 1 {ended}", False), None, RuntimeError("Connection closed by peer [::1]:5")))
    assert said == (
        f"Rank 1 {ended}. The last lines that it printed say why. Start the same command again. What torch.distributed "
        "said: Connection closed by peer [::1]:5."
    )
    rank_processes._children.append(lives)
    assert rank_processes.child_exit_reason(0, 0.1) == (f"Rank 1 {ended}", False)
    lives.terminate()
    how = rank_processes.child_exit_reason(0, 60.0)
    assert how == (f"Rank 2 (process {lives.pid}) was killed by SIGTERM", True)
    assert has_lost_another(RuntimeError("Connection closed by peer [::1]:5"))
    rank_processes._children[:] = []
    assert rank_processes.child_exit_reason(0) is None


def wait_for(path: Path, pattern: str, children: list, seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not list(path.glob(pattern)):
        assert time.monotonic() < until and all(child.poll() is None for child in children), "it never came to that"
        time.sleep(0.02)


def ranks_of_slurm(process, patch: pytest.MonkeyPatch, tmp_path: Path, folder: Path, generator: str, n: int) -> list:
    """`n` ranks, as Slurm would start them; what each says is in `rank_<rank>`. The rollout of step 4 is slow."""
    told = {"JOB_ID": os.getpid(), "NTASKS": n, "NTASKS_PER_NODE": n, "NODEID": 0, "NODELIST": "localhost"}
    for name, value in {**told, "JOB_NAME": "a"}.items():
        patch.setenv(f"SLURM_{name}", str(value))
    patch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    patch.setenv("MET", str(tmp_path))
    patch.setenv("SLOW_AT", "4")
    slow = [f"generator._target_=slow_generators.{generator}", "allow_targets=[slow_generators]"]
    size = [f"trainer.devices={n}", f"data.prompts_per_rollout={2 * n}", f"run_dir={folder}"]
    children = []
    for rank in range(n):
        patch.setenv("SLURM_PROCID", str(rank))
        patch.setenv("SLURM_LOCALID", str(rank))
        said = (tmp_path / f"rank_{rank}").open("w+")
        children.append(process(*TWO, *slow, *size, stdout=said))
    return children


def test_a_second_signal_to_one_of_three_ranks_ends_all_at_once(
    process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they do what no first signal ends."""
    folder = tmp_path / "run"
    children = ranks_of_slurm(process, monkeypatch, tmp_path, folder, "Stubborn", 3)
    for rank in range(3):
        wait_for(tmp_path, f"met_{rank}", children)
    assert json.loads((folder / "summary.json").read_text())["status"] == "running"
    children[1].send_signal(signal.SIGTERM)
    until = time.monotonic() + 60
    while "Once more to stop at once" not in (tmp_path / "rank_0").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    children[1].send_signal(signal.SIGTERM)
    began = time.monotonic()
    codes = [child.wait(100) for child in children]
    output = "".join((tmp_path / f"rank_{rank}").read_text() for rank in range(3))
    assert codes == [128 + signal.SIGTERM] * 3 and time.monotonic() - began < AT_ONCE, output
    assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
    assert not (folder / LOCK_FILE).exists() and not (folder / "error.json").exists()


def test_slurms_signal_to_one_rank_ends_both_saved_and_one_process_goes_on(
    process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While both decode a rollout that would last for minutes. Rank 0 holds the folder. Slurm itself is not here: its
    variables are."""
    stands_in = tmp_path / "bin" / "scontrol"
    stands_in.parent.mkdir()
    stands_in.write_text(f"#!/bin/sh\necho $* >> {tmp_path / 'asked'}\n")
    stands_in.chmod(0o755)
    folder = tmp_path / "run"
    with monkeypatch.context() as slurm:
        slurm.setenv("PATH", f"{stands_in.parent}:{os.environ['PATH']}")
        children = ranks_of_slurm(process, slurm, tmp_path, folder, "SlowNative", 2)
    for rank in range(2):
        wait_for(tmp_path, f"met_{rank}", children)
    assert json.loads((folder / LOCK_FILE).read_text())["pid"] == children[0].pid
    with pytest.raises(StorageError, match=f"in use by process {children[0].pid}"):
        RunLock(folder)
    children[1].send_signal(signal.SIGUSR1)
    began = time.monotonic()
    codes = [child.wait(120) for child in children]
    output = "".join((tmp_path / f"rank_{rank}").read_text() for rank in range(2))
    assert codes == [128 + signal.SIGUSR1] * 2, output
    assert time.monotonic() - began < AT_ONCE
    assert (tmp_path / "asked").read_text() == f"requeue {os.getpid()}\n", "by rank 0, once"
    assert not (folder / LOCK_FILE).exists() and not (folder / "error.json").exists()
    assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"

    step = newest(folder)["global_step"]
    assert step == 4
    last = [word for word in TWO if "devices" not in word and "strategy" not in word]
    again = process(*last, f"trainer.max_steps={step + 3}", f"run_dir={folder}", "ckpt_path=last")
    output, _ = again.communicate(timeout=240)
    assert again.returncode == 0, output
    assert "written by 2 processes, and this run has 1" in output
    assert newest(folder)["global_step"] == step + 3


BESIDE = f"{Path(__file__).with_name('slow_in_two.py')}:"
STANDS_STILL = {
    "judge": ["algo=online_dpo", "algo.group_size=2", "judge=function", f"judge.fn={BESIDE}judge"],
    "new groups": ["algo/groups=dynamic", "reward=function", f"reward.fn={BESIDE}reward", "algo.minibatches=1"],
}
"""What asks a function that stands still for two minutes at the third step, of both ranks or of one."""


@pytest.mark.parametrize("what", ["judge", pytest.param("new groups", marks=pytest.mark.exhaustive)])
def test_ranks_give_up_together_what_one_of_them_waits_for(
    process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """And the run that goes on equals the whole one."""
    words = [*TWO, *STANDS_STILL[what], "trainer.max_steps=4", "callbacks.checkpoint.save_top_k=-1"]
    whole, run, stands = tmp_path / "whole", tmp_path / "run", tmp_path / "stands"
    assert process(*words, f"run_dir={whole}").wait(240) == 0
    with monkeypatch.context() as slow:
        slow.setenv("STANDS", str(stands))
        child = process(*words, f"run_dir={run}")
        wait_for(tmp_path, "stands_[01]", [child])
        child.send_signal(signal.SIGTERM)
        began = time.monotonic()
        output, _ = child.communicate(timeout=240)
    assert child.returncode == 128 + signal.SIGTERM, output
    assert time.monotonic() - began < AT_ONCE, output
    assert newest(run)["global_step"] == 2 and "Stopped at step 2, saved" in output
    assert process(*words, f"run_dir={run}", "ckpt_path=last").wait(240) == 0
    assert_same_run(whole, run)


def test_a_signal_to_one_of_two_ranks_that_score_a_validation_ends_both_saved(
    process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which rank 0 hears nothing but what rank 1 says where they meet next."""
    run = tmp_path / "run"
    scored = ["reward=function", f"reward.fn={BESIDE}reward", "reward.workers=0"]  # by the rank itself
    words = [*scored, "trainer.limit_val_batches=1", "trainer.val_check_interval=2"]
    monkeypatch.setenv("STANDS", str(tmp_path / "stands"))
    child = process(*TWO, *words, "trainer.max_steps=4", f"run_dir={run}")
    for rank in range(2):
        wait_for(tmp_path, f"stands_{rank}", [child])
    rank_1 = int((tmp_path / "stands_1").read_text())
    assert rank_1 != child.pid
    os.kill(rank_1, signal.SIGTERM)
    began = time.monotonic()
    output, _ = child.communicate(timeout=240)  # the pipe is closed when both have ended
    assert child.returncode == 128 + signal.SIGTERM, output
    assert time.monotonic() - began < AT_ONCE, output
    assert newest(run)["global_step"] == 2 and "Stopped at step 2, saved" in output
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped"
    assert not (run / LOCK_FILE).exists() and not (run / "error.json").exists()


def started_by(process: int) -> list[int]:
    """The ranks that this process has started, from the moment that the system knows them as such."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent_id = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent_id == process and f"{STARTED_BY}={process}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def waits_for_rank_0(process: int) -> bool:
    """Whether it has loaded PyTorch, and has computed nothing for a second."""
    if "libtorch_cpu" not in Path(f"/proc/{process}/maps").read_text():
        return False
    before = cpu_seconds(process)
    time.sleep(1.0)
    return cpu_seconds(process) - before < 0.1


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    "rank_1", ["waits for rank 0", pytest.param("has just been started", marks=pytest.mark.exhaustive)]
)
def test_a_rank_that_rank_0_has_started_ends_with_it_before_they_have_met(
    process, tmp_path: Path, rank_1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for half an hour. Rank 0 is stopped where it has started rank 1, and killed there."""
    monkeypatch.setattr(warm, "Popen", subprocess.Popen)  # rank 1 has to be a child of rank 0
    child = process(*TWO, f"run_dir={tmp_path / 'run'}")
    until = time.monotonic() + 240
    while not (started := started_by(child.pid)):
        assert time.monotonic() < until and child.poll() is None, "it never came to that"
    if rank_1 == "waits for rank 0":
        child.send_signal(signal.SIGSTOP)
        while not waits_for_rank_0(started[0]):
            assert time.monotonic() < until, "it never came to that"
    child.kill()
    began = time.monotonic()
    output, _ = child.communicate(timeout=60)  # the pipe is closed when both have ended
    assert time.monotonic() - began < AT_ONCE, output
    assert f"Process {child.pid}, rank 0, which had started this one ({started[0]}), has died" in output


STARTS = """
import os, subprocess, sys, threading
os.environ |= {"LIT_RL_STARTED_BY": str(os.getpid()), "LOCAL_RANK": "1"}
thread = threading.Thread(target=lambda: subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=sys.stdout))
thread.start()
thread.join()
sys.stdin.readline()
"""
WORKS = """
import os, sys, time
from lit_rl.runs import rank_processes as parent

def gave_up(error):
    print(f"{type(error).__name__}", "STARTED_BY" in "".join(os.environ), flush=True)
    return error.exit_code

parent.end_with_parent()
with parent.while_parent_matters(gave_up):
    pass  # the first job of a sweep
time.sleep(1.0)
with parent.while_parent_matters(gave_up):
    print("begun", flush=True)
    time.sleep(float(sys.argv[1]))
print("writes", flush=True)
time.sleep(2.0)
print("written", flush=True)
"""


@contextmanager
def parent_of(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a parent, which is killed after a minute: a child that breaks must not leave its reader waiting."""
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        end = threading.Timer(60, parent.kill)
        end.start()
        try:
            yield parent
        finally:
            end.cancel()


@pytest.mark.parametrize(
    ("work", "said"), [(60.0, ["begun", "BackendError False"]), (0.0, ["begun", "writes", "written"])]
)
def test_a_rank_ends_with_its_parent_while_they_work_together_and_writes_what_it_writes_then(
    work: float, said: list[str]
) -> None:
    """Not with the thread of its parent that has started it."""
    words = [sys.executable, "-c", STARTS, WORKS, str(work)]
    with parent_of(words) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.readline() == "begun\n"
        time.sleep(1.0)
        began = time.monotonic()
        parent.stdin.close()
        assert ["begun", *parent.stdout.read().split("\n")[:-1]] == said
        assert time.monotonic() - began < AT_ONCE


def test_a_rank_that_a_script_has_started_for_rank_0_watches_rank_0() -> None:
    """Where Python is a wrapper that does not become what it starts, its parent is not rank 0."""
    wrapped = STARTS.replace("[sys.executable, ", "['sh', '-c', '\"$@\"; exit $?', 'wrapper', sys.executable, ")
    assert wrapped != STARTS
    words = [sys.executable, "-c", wrapped, WORKS, "60.0"]
    with parent_of(words) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.readline() == "begun\n"
        time.sleep(2.0)
        began = time.monotonic()
        parent.stdin.close()
        assert parent.stdout.read() == "BackendError False\n"
        assert time.monotonic() - began < AT_ONCE


FAULTS = {"raises": {1: "raises"}, "dies": {1: "dies"}, "hangs": {0: "raises", 1: "hangs"}}
"""By rank; rank 0 has started rank 1."""


@pytest.mark.parametrize("fault", ["raises", "dies", pytest.param("hangs", marks=pytest.mark.exhaustive)])
def test_a_rank_that_fails_ends_the_others_and_is_heard_last(
    process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Rank 0 ends by itself: Lightning, which would kill it after five seconds, is kept from that."""
    folder, first = tmp_path / "run", 0 if fault == "hangs" else 1
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("MET", str(tmp_path))
    for rank, what in FAULTS[fault].items():
        monkeypatch.setenv(f"FAULT_{rank}", what)
    faulty = ["generator._target_=failing_generators.Faulty", "allow_targets=[failing_generators]"]
    child = process(*TWO, *faulty, f"run_dir={folder}")
    wait_for(tmp_path, f"met_{first}", [child])
    began = time.monotonic()
    output, _ = child.communicate(timeout=120)  # the pipe is closed when both have ended
    grace = 10 if fault == "hangs" else 0  # which rank 0, that fails, gives to rank 1
    assert time.monotonic() - began < grace + AT_ONCE, output
    assert whole_step(folder) == 4, "two rollouts of two steps, each of which is saved"
    error, summary = (json.loads((folder / f"{name}.json").read_text()) for name in ("error", "summary"))
    assert (summary["status"], summary["exit_code"]) == ("failed", child.returncode), output
    if fault == "dies":
        assert (child.returncode, error["error"], error["rank"]) == (8, "BackendError", 0), output
        said = error["message"]
        assert re.match(
            r"Rank 1 \(process \d+\) was killed by SIGKILL \(as the kernel does when memory is out\)\. ", said
        )
        assert f"ckpt_path=last run_dir={folder} to resume the run" in said and "printed say why" not in said
        assert "What torch.distributed said: " in said.rpartition(". ")[2] and f"BackendError: {said}" in output
        assert "RuntimeError" in error["traceback"]
        return
    assert child.returncode == 1, output
    assert (error["error"], error["rank"]) == ("LookupError", first)
    assert output.strip().endswith("LookupError: the first words"), output
    assert f"rank {first} on" in output or not first


STANDS = """
import os, pathlib, subprocess, sys, threading, types
import lightning as L
import torch
from lightning.fabric.strategies.launchers.subprocess_script import _launch_process_observer
from lit_rl.cli.run_failures import record_lost_rank
from lit_rl.runs.rank_processes import watching_children
from lit_rl.runs.run_dir import RunDir

trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
trainer.strategy._launcher = types.SimpleNamespace(procs=[])
folder = RunDir(pathlib.Path(sys.argv[1]))
if sys.argv[3] == "met":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
with watching_children(trainer, lambda error: record_lost_rank(error, folder, trainer, "train.py"), float(sys.argv[2])):
    trainer.strategy.launcher.procs.append(subprocess.Popen(["false"]))
    _launch_process_observer(trainer.strategy.launcher.procs)
    threading.Event().wait(60)
"""


@pytest.mark.parametrize(("seconds", "where"), [("7", "met"), ("100", "before they meet")])
def test_rank_0_that_stands_where_nothing_fails_ends_too_and_says_why(tmp_path: Path, seconds: str, where: str) -> None:
    """Longer than the five seconds after which Lightning's observer, of which this is the real one, would kill it."""
    done = warm.run([sys.executable, "-c", STANDS, str(tmp_path), seconds, where])
    said = json.loads((tmp_path / "error.json").read_text())
    assert (done.returncode, said["error"], said["rank"]) == (8, "BackendError", 0), done.stderr
    assert "has ended with exit code 1" in said["message"] and said["message"] in done.stderr


@pytest.mark.exhaustive
def test_memory_that_one_of_two_ranks_does_not_get_ends_both_with_what_was_planned(
    process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    words = ["generator._target_=failing_generators.FindsNoMemory", "allow_targets=[failing_generators]"]
    child = process(*TWO, *words, f"run_dir={tmp_path / 'run'}")
    output, _ = child.communicate(timeout=240)
    assert child.returncode == 8 and "generator.batch_size=4 (it was 8;" in output, output
    assert "rank 1 on" in output, "which failed first"


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_rank_that_hangs_in_a_reward_ends_the_run_which_says_where_it_stands(
    process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    folder, fn = tmp_path / "run", Path(__file__).with_name("hanging_rewards.py")
    monkeypatch.setenv("HANGS_ON_RANK", str(rank))
    rewarded = ["reward=function", f"reward.fn={fn}:hangs", "reward.timeout=null"]
    rewarded += ["callbacks.watchdog.limit=20"]
    child = process(*TWO, *rewarded, "trainer.max_steps=8", f"run_dir={folder}")
    output, _ = child.communicate(timeout=300)  # the pipe is closed when both have ended
    assert child.returncode == 8, output
    assert whole_step(folder) == 4
    error = json.loads((folder / "error.json").read_text())
    assert (error["error"], error["exit_code"], error["rank"]) == ("BackendError", 8, 1 - rank), output
    said = error["message"]
    assert (waited := re.match(rf"Rank {rank} did not arrive: rank {1 - rank} waited (\d+) s", said)), said
    assert 20 <= int(waited[1]) < 20 + AT_ONCE and "optimizer step 5" in said
    assert "lit_rl/rewards/" in said and "in take_rollout" in said and "reward.timeout" in said
    assert said in output


def test_ranks_that_all_wait_for_each_other_are_told_within_seconds(
    process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of a rank that does not come is half an hour here."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("MET", str(tmp_path))
    words = ["+callbacks.waits._target_=hanging_callbacks.WaitsForAWord", "allow_targets=[hanging_callbacks]"]
    child = process(*TWO, *words, "callbacks.watchdog.all_wait=8", f"run_dir={tmp_path / 'run'}")
    wait_for(tmp_path, "met_1", [child])
    began = time.monotonic()
    output, _ = child.communicate(timeout=300)  # the pipe is closed when both have ended
    assert child.returncode == 8 and "All ranks wait for each other, rank " in output, output
    assert "in on_train_batch_start" in output and "callbacks.watchdog.all_wait" in output
    assert whole_step(tmp_path / "run") == 2
    assert time.monotonic() - began < 8 + 2 * AT_ONCE, output


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "said"),
    [("waits", "All ranks wait for each other, rank "), ("is stopped", "Rank 1 does not answer either")],
)
def test_ranks_that_wait_for_each_other_and_one_that_cannot_answer(
    process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("MET", str(tmp_path))
    monkeypatch.setenv("FAULT_1", fault)
    faulty = ["generator._target_=failing_generators.Faulty", "allow_targets=[failing_generators]"]
    child = process(*TWO, *faulty, "callbacks.watchdog.limit=40", f"run_dir={tmp_path / 'run'}")
    output, _ = child.communicate(timeout=300)  # the pipe is closed when both have ended
    assert child.returncode == 8 and said in output, output
