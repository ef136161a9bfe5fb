"""One run a folder at a time: real processes that hold it, die, and are followed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from runs_helpers import SMALL

from lit_rl.cli.hydra_app import _reserved
from lit_rl.core.errors import StorageError
from lit_rl.runs.run_lock import LOCK_FILE, RunLock

HOLDS = "import sys, pathlib, lit_rl.runs.run_lock as run_lock; held = run_lock.RunLock(pathlib.Path(sys.argv[1]))"


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder and waits; a process that it started lives on after it."""
    waits = "import subprocess; subprocess.Popen(['sleep', '30']); print('held', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{HOLDS}; {waits}", str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    yield child
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def test_who_holds_it_is_named_and_whoever_dies_holds_nothing(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=rf"is in use by process {holder.pid} on \S+ since \d{{4}}-\d\d-\d\dT"):
        RunLock(tmp_path)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == holder.pid, "what the holder wrote stays"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    lock = RunLock(tmp_path)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    with pytest.raises(StorageError, match="in use by process"):
        RunLock(tmp_path)
    lock.close()
    lock.close()
    assert not list(tmp_path.iterdir())
    RunLock(tmp_path).close()


def test_a_child_that_lives_on_holds_nothing(tmp_path: Path) -> None:
    """Forked, not started anew: it has every file of its parent."""
    forks = "import os, time; child = os.fork(); child or (os.close(1), time.sleep(30)); os.write(1, b'%d' % child)"
    done = subprocess.run(
        [sys.executable, "-c", f"{HOLDS}; {forks}; os._exit(0)", str(tmp_path)], stdout=subprocess.PIPE
    )
    RunLock(tmp_path).close()
    os.kill(int(done.stdout), signal.SIGKILL)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_where_the_file_system_knows_no_locks_the_run_goes_on(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    for _ in range(2):  # and what the first leaves behind stops no other one
        lock = RunLock(tmp_path)
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(StorageError, match=r"/proc cannot be written .* another trainer.default_root_dir"):
        RunLock(Path("/proc"), "trainer.default_root_dir")


def test_a_file_that_its_holder_removes_before_it_is_locked_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[int]()
    flock = fcntl.flock

    def remove_and_lock(file: int, how: int) -> None:
        if not tried and how & fcntl.LOCK_EX:
            (tmp_path / LOCK_FILE).unlink()
        tried.append(how)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    lock = RunLock(tmp_path)
    with pytest.raises(StorageError, match=f"in use by process {os.getpid()}"):
        RunLock(tmp_path)
    lock.close()


def test_a_file_that_somebody_replaced_is_the_other_ones(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    (tmp_path / LOCK_FILE).unlink()
    other = RunLock(tmp_path)
    lock.close()
    with pytest.raises(StorageError, match="in use by process"):
        RunLock(tmp_path)
    other.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.all
def test_a_folder_that_somebody_holds_is_let_alone(train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    small = [*SMALL, "trainer.max_steps=1", "callbacks.checkpoint.every_n_train_steps=1", f"run_dir={folder}"]
    assert train(*small) == 0
    assert not (folder / LOCK_FILE).exists()
    lock = RunLock(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for more in (["trainer.max_steps=3", "ckpt_path=last"], []):
        (folder / "summary.json").unlink(missing_ok=True)  # a run that goes on has none that says finished
        before.pop(folder / "summary.json", None)
        capsys.readouterr()
        assert train(*small, *more) == 7
        assert f"in use by process {os.getpid()}" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    lock.close()
    assert train(*small, "trainer.max_steps=2", "ckpt_path=last") == 0


@pytest.mark.all
def test_runs_that_begin_in_one_second_have_folders_of_their_own(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    class Stopped:
        @staticmethod
        def now() -> Stopped:
            return Stopped()

        def __format__(self, form: str) -> str:
            return "2026-11-26_120000"

        strftime = __format__

    monkeypatch.setattr("lit_rl.cli.run_info.datetime", Stopped)
    monkeypatch.setattr("lit_rl.cli.hydra_app.datetime", Stopped)
    for _ in range(2):
        assert train(*SMALL, "trainer.max_steps=1") == 0
    first, second = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert second == f"{first}_2"
    for _ in range(2):
        assert train(*SMALL, "task=eval", "run_dir=mine", "eval.limit=1") == 0
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"eval_2026-11-26_120000", "eval_2026-11-26_120000_2"}


def test_runs_that_begin_at_one_moment_have_folders_of_their_own(tmp_path: Path) -> None:
    name, at_once = tmp_path / "runs" / "2026-11-26_120000_grpo_tiny", threading.Barrier(16)

    def began(_: int) -> tuple[Path, list[Path]]:
        at_once.wait()
        run_dir, made = _reserved(name)
        return run_dir.path, made

    with ThreadPoolExecutor(16) as threads:
        begun = list(threads.map(began, range(16)))
    expected = {name, *(name.with_name(f"{name.name}_{number}") for number in range(2, 17))}
    assert {path for path, _ in begun} == expected == {*(tmp_path / "runs").iterdir()}
    assert all(made[0] == path for path, made in begun), "what a start that fails removes is its own folder"
