"""Processes wait for their next turn as long as there is room for them, and results say of which code they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.bounds import revision
from bench.protocol import Process
from bench.run import Waiting

STEPS = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    if json.loads(line)["do"] == "stop":
        break
    print(json.dumps({"seconds": 0.0, "phases": {}}), flush=True)
"""


class Turns:
    """Turns of small processes that do nothing; writes down who was started."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.started = folder, ""

    def take(self, waiting: Waiting, names: str) -> str:
        """Who runs after these turns."""
        for name in names:
            with waiting.turn(name, lambda name=name: self._process(name), lambda process: None) as process:
                process.step()
        return "".join(waiting.names)

    def _process(self, name: str) -> Process:
        self.started += name
        command, log = [sys.executable, "-S", "-c", STEPS], self._folder / name / "log.txt"
        return Process(command, dict(os.environ), log, sorted(os.sched_getaffinity(0)))


@pytest.fixture
def turns(tmp_path: Path) -> Turns:
    return Turns(tmp_path)


def peak(turns: Turns) -> int:
    """Bytes of one of the processes."""
    with turns._process("one") as process:
        found = process.usage().peak
    turns.started = ""
    return found


def test_those_measured_last_wait_and_come_first_in_the_next_round(turns: Turns) -> None:
    with Waiting(2.5 * peak(turns)) as waiting:
        assert turns.take(waiting, "abcd") == "cd" and turns.started == "abcd"
        assert turns.take(waiting, "dcba") == "ba" and turns.started == "abcdba"
        assert turns.take(waiting, "a") == "ba" and turns.started == "abcdba"
    assert waiting.names == []


def test_without_room_nobody_waits(turns: Turns) -> None:
    with Waiting(0) as waiting:
        assert turns.take(waiting, "aba") == "" and turns.started == "aba"


def test_a_failure_in_a_turn_leaves_no_process(turns: Turns) -> None:
    with pytest.raises(ZeroDivisionError), Waiting(10 * peak(turns)) as waiting:
        turns.take(waiting, "a")
        with waiting.turn("a", lambda: turns._process("a"), lambda process: None) as process:
            pid = process.pid
            raise ZeroDivisionError
    assert not Path(f"/proc/{pid}").exists()


def test_the_code_that_was_measured(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    git("init", "-q")
    (tmp_path / "docs").mkdir()
    for name in ("code.py", "docs/page.md"):
        (tmp_path / name).write_text("one")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "docs" / "page.md").write_text("what a benchmark writes")
    assert revision(tmp_path) == {"commit": commit, "changed": False}
    (tmp_path / "code.py").write_text("two")
    assert revision(tmp_path) == {"commit": commit, "changed": True}


def test_no_commit_outside_of_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert revision(tmp_path) == {"commit": None, "changed": False}
