"""What programs try against each runner of the code reward: one program tries many things in one start."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from test_rewards_code import FORKS, RIGHT, TESTS, THREADS, verdict

from lit_rl.core.errors import BackendError
from lit_rl.rewards import CodeExecution, sandbox

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="the limits are those of Linux")]


def allowed(runner: Any, **settings: Any) -> CodeExecution:
    """The reward with this runner; where that cannot run, the test is skipped in words."""
    if runner == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed (apt-get install bubblewrap)")
    if runner == "bubblewrap" and (said := sandbox.failed_trial()) is not None:
        pytest.skip(f"bubblewrap is installed and cannot make its namespaces here: {said}")
    return CodeExecution(True, runner=runner, **{"timeout": 30, "memory_mb": 256, **settings})


RUNNERS = pytest.mark.parametrize("runner", ["process", "bubblewrap"])
PROGRAM = """
import itertools, math
from collections import Counter

LIMIT = 3

class Full(ValueError):
    pass

class Stack:
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, item):
        if len(self.items) == LIMIT:
            raise Full("no room", LIMIT)
        self.items.append(item)
        return self
    def __len__(self):
        return len(self.items)
    def __getitem__(self, i):
        return self.items[i]
    def __eq__(self, other):
        return self.items == other.items
    def __iter__(self):
        return iter(self.items)

def double(x): return 2 * x
def fill(items): items.append(4); items.sort()
def apply(f, *args): return f(*args)
def squares(n): return (i * i for i in range(n))
def count(text): return Counter(text)
def fails(): raise KeyError("gone")
def mixed(): return {"a": (1, 2.5, None, True), 2: [{3}, frozenset({4}), b"x", 2**100, 1j, float("inf")]}
async def later(): return 5
"""
KINDS = [
    "assert double(2) == 4 and double('ab') == 'abab' and LIMIT == 3 and math.sqrt(4) == 2",
    "items = [3, 1]; fill(items); assert items == [1, 3, 4]",
    "assert apply(lambda a, b: a - b, 5, 3) == 2 and apply(max, 1, 7) == 7 and apply(math.sqrt, 9) == 3",
    "assert list(squares(4)) == [0, 1, 4, 9] and sum(squares(3)) == 5 and count('aab') == {'a': 2, 'b': 1}",
    "assert mixed() == {'a': (1, 2.5, None, True), 2: [{3}, frozenset({4}), b'x', 2**100, 1j, float('inf')]}",
    "s = Stack([1]); assert len(s.push(2)) == 2 and s[1] == 2 and list(s) == [1, 2] and s == Stack([1, 2])",
    "assert isinstance(s, Stack) and not isinstance(3, Stack) and s is not None and s.items == [1, 2]",
    "s.push(3)\ntry:\n    s.push(4)\nexcept Full as full:\n    assert full.args == ('no room', 3)\nelse:\n    1 / 0",
    "try:\n    fails()\nexcept KeyError as error:\n    assert error.args == ('gone',)\nelse:\n    assert False",
    "def check(candidate):\n    assert candidate(3) == 6\ncheck(double)",
]


@RUNNERS
def test_tests_speak_with_a_program_in_plain_values_and_hold_its_objects(runner):
    reward = allowed(runner)
    told: dict[str, list[str]] = {}
    block = f"```python\n{PROGRAM}```"
    assert reward([None], [block], lambda name, values: told.update({name: values}), tests=[KINDS]) == [1.0], told


FORGERIES = {
    # the words of `process` say what it does not stop
    "by frames": (
        "import os, sys\ndef double(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        if 'nonce' in frame.f_locals:\n"
        "            os.write(frame.f_locals['verdict'], frame.f_locals['nonce'])\n            os._exit(0)\n"
        "        frame = frame.f_back\n    return 0",
        "AssertionError",
    ),
    "by an object": (
        "class Any:\n    def __eq__(self, other):\n        return True\ndef double(x):\n    return Any()",
        "TypeError: the program gave an object of its own (Any)",
    ),
    "by a built-in name": (
        "import builtins\nbuiltins.AssertionError = all = any = 1\ndef double(x): return 0",
        "Asser",
    ),
    "by any descriptor": (
        "import os\ndef double(x):\n    for fd in map(int, os.listdir('/proc/self/fd')):\n"
        "        try: os.write(fd, b'begun\\n\"passed\"')\n        except OSError: pass\n    os._exit(0)",
        "the program sent what is no message",
    ),
    "by a message": (
        "import gc, json\ndef double(x):\n"
        "    [peer] = [o for o in gc.get_objects() if type(o).__name__ == 'Peer']\n"
        "    peer.send(['ask', 'call', 0, [], {}])\n    peer.receive()\n"
        "    peer.send(['is', 4, [[0, 1]]])\n    return 4",
        "the program sent what is no answer",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_program_cannot_forge_its_verdict(forgery):
    code, told = FORGERIES[forgery]
    assert told in verdict(allowed("bubblewrap"), code)


@pytest.mark.filterwarnings("ignore:CodeExecution")
def test_what_the_plain_runner_does_not_stop_is_as_its_docstring_says():
    assert "pretend to have passed" in str(CodeExecution.__doc__)
    assert verdict(allowed("process"), FORGERIES["by frames"][0]) == "passed"


TRIED = """
import ctypes, os, signal, socket, sys

def refused(f, *args):
    try:
        return f(*args) in (-1, None) and "nothing"
    except Exception as error:
        return type(error).__name__

def fill(folder):
    written = 0
    try:
        for i in range(40):
            with open(f"{folder}/{i}", "wb", buffering=0) as file:
                for _ in range(15):
                    written += file.write(bytes(2**20))
    except OSError:
        pass
    for i in os.listdir(folder):
        if i.isdigit():  # an interpreter below /tmp can be seen there
            os.remove(f"{folder}/{i}")
    return written // 2**20

libc = ctypes.CDLL(None)
def kill():
    os.kill(1, signal.SIGKILL)
    os.kill(1, signal.SIGSTOP)

def frames():
    frame, seen = sys._getframe(), []
    while frame:
        seen.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    return "needle" + "42" in "".join(seen)

seen = {
    "reads": [refused(open, path) for path in (SECRET, os.path.dirname(SECRET), "/etc/passwd", "/etc/shadow")],
    "homes": [name for name in os.listdir("/home") ] if os.path.isdir("/home") else [],
    "writes": [refused(open, path, "w") for path in ("/x", "/usr/x", "/etc/x", "/dev/x", SECRET, sys.prefix + "/x")],
    "fills": (fill("/tmp"), fill("/dev/shm")),
    "network": [refused(socket.create_connection, address, 1) for address in (("127.0.0.1", PORT), ("192.0.2.1", 9))],
    "own": [refused(libc.unshare, 0x10000000), refused(libc.shmget, 0, 4096, 0o1600), refused(os.memfd_create, "x"),
            refused(libc.ptrace, 16, 1, 0, 0)],
    "kills": refused(kill),
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
    "secrets": "s3cret" in repr(dict(os.environ)),
    "tests": frames(),
    "rights": [line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "CapBnd"))],
    "root": os.getuid() == 0 and os.access("/root", os.W_OK),
}
"""


def test_a_program_reaches_nothing_outside(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    reward = allowed("bubblewrap")
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    tmp_path.chmod(0o755)
    listens = socket.create_server(("127.0.0.1", 0))
    code = TRIED.replace("SECRET", repr(str(secret))).replace("PORT", str(listens.getsockname()[1]))
    expected = {
        "reads": "== ['FileNotFoundError'] * 4",
        "homes": "== []",
        "writes": "== ['OSError'] * 4 + ['FileNotFoundError', 'OSError']",
        "fills": "[0] <= 64 and seen['fills'][1] <= 16",
        "network": "== ['ConnectionRefusedError', 'OSError']",
        "own": "== ['nothing', 'nothing', 'PermissionError', 'nothing']",
        "kills": "in ('nothing', 'PermissionError')",
        "processes": "<= 3",
        "secrets": "is False",
        "tests": "is False and 'needle42' != 0",
        "rights": "== ['0' * 16] * 2",
        "root": "is False",
    }
    checks = [f"assert seen[{key!r}] {what}, seen[{key!r}]" for key, what in expected.items()]
    with listens:
        assert verdict(reward, code + RIGHT, "\n".join([*checks, TESTS])) == "passed"
    assert secret.read_text() == "s3cret"


GROUP = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"NAME", 0, 0, 0)
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        held = bytearray(os.urandom(1)) * (100 * 2**20)
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""


def test_memory_is_limited_for_all_processes_together_and_none_is_left():
    name = f"lg{os.getpid()}"
    assert verdict(allowed("bubblewrap"), GROUP.replace("NAME", name)) == "took more than 256 MiB in all its processes"
    held = [file.read_text() for file in Path("/proc").glob("[0-9]*/status") if file.exists()]
    assert not [text for text in held if f"Name:\t{name}\n" in text and "VmRSS:" in text]


@pytest.mark.parametrize("seconds", [0.0, 0.003, 0.01, 0.03])
def test_a_sandbox_that_is_ended_while_it_starts_leaves_nothing(seconds: float):
    """Its first process once waited for ever for the one that had been killed, and held the pipe that we read."""
    allowed("bubblewrap")
    runner = sandbox.Bubblewrap(seconds=5, memory_mb=256, processes=4)
    with runner._start_both("", []) as started:
        time.sleep(seconds)
    assert [process.returncode for process in started] == [-9, -9]
    deadline = time.monotonic() + 5
    while left := orphans():  # those of other tests of this machine are gone soon, one that waits for ever is not
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_a_trainer_may_have_any_number_of_files_open():
    with contextlib.ExitStack() as opened:
        for _ in range(1100):
            opened.enter_context(open(os.devnull))
        assert verdict(allowed("bubblewrap"), RIGHT) == "passed"


def orphans() -> list[Path]:
    """Return the processes of sandboxes whose parent has ended."""
    alone = [file.parent for file in Path("/proc").glob("[0-9]*/status") if b"\nPPid:\t1\n" in content(file)]
    return [folder for folder in alone if b"sandbox_script.py" in content(folder / "cmdline")]


def content(file: Path) -> bytes:
    with contextlib.suppress(OSError):
        return file.read_bytes()
    return b""


def test_processes_and_time_are_limited():
    forks = FORKS.replace("SETSID", "pass")
    assert verdict(allowed("bubblewrap"), forks + RIGHT, f"assert 1 <= count <= 7, count\n{TESTS}") == "passed"
    assert verdict(allowed("bubblewrap"), THREADS + RIGHT, f"assert 1 <= started <= 7, started\n{TESTS}") == "passed"
    assert verdict(allowed("bubblewrap", timeout=0.5), "while True: pass") == "took more than 0.5 seconds"


def test_a_runner_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BackendError, match="apt-get install bubblewrap") as refused:
        CodeExecution(True, runner="bubblewrap")
    assert refused.value.exit_code == 8
