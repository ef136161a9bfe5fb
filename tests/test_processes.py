"""How a child process ends, and that nothing is left of its group."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lit_rl.core.processes import Child, group_members, how_ended, is_alive

STARTS = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('ready', flush=True); sys.stdin.read()"


def started(grace: float = 0.0) -> Child:
    """A process that has started another one."""
    child = Child([sys.executable, "-c", STARTS], grace, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.process.stdout is not None and child.process.stdout.readline() == b"ready\n"
    assert len(group_members(child.process.pid)) == 2 and child.alive and is_alive(child.process.pid)
    return child


@pytest.mark.parametrize("grace", [0.0, 5.0])
def test_its_group_is_gone_when_the_call_returns(grace: float) -> None:
    child = started(grace)
    child.end()
    child.end()
    assert group_members(child.process.pid) == [] and not child.alive
    assert child.process.returncode == (-15 if grace else -9)


def test_it_ends_with_its_object() -> None:
    child = started()
    group = child.process.pid
    del child
    assert group_members(group) == []


AT_EXIT = """
import os, sys
import test_processes
child = test_processes.started()
if not (fork := os.fork()):
    child.end()
    sys.exit()
assert os.waitpid(fork, 0)[1] == 0
print(child.process.pid, len(test_processes.group_members(child.process.pid)))
"""


def test_it_ends_with_the_process_that_started_it_and_by_no_fork() -> None:
    words = [sys.executable, "-c", AT_EXIT]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, cwd=os.path.dirname(__file__))
    group, members_after_the_fork = map(int, done.stdout.split())
    assert members_after_the_fork == 2 and group_members(group) == []


def test_a_zombie_is_not_alive() -> None:
    with subprocess.Popen(["true"], start_new_session=True) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(child.pid) and group_members(child.pid) == []
    assert is_alive(os.getpid()) and is_alive(1)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "has ended with exit code 0"),
        (3, "has ended with exit code 3"),
        (-15, "was killed by SIGTERM"),
        (-9, "was killed by SIGKILL (as the kernel does when memory is out)"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_end_is_told_in_words(code: int, words: str) -> None:
    assert how_ended(code) == words
