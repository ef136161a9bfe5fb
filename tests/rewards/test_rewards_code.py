"""Code of a model runs against its tests, and whatever it does, it ends and leaves nothing behind.

Nothing here grows without end should a limit not hold: at most 20 processes, that sleep.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import pytest

from lit_rl.core.errors import BackendError, RewardError
from lit_rl.rewards import CodeExecution, Rewards
from lit_rl.rewards import code_rewards as code_module
from lit_rl.rewards.code_rewards import NO_CODE, last_block, namespaces

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limits are those of Linux"),
    pytest.mark.filterwarnings("ignore:CodeExecution"),
]
TESTS = "assert double(2) == 4\nassert double(0) == 0"
RIGHT = "def double(x):\n    return 2 * x\n"


def block(code: str, language: str = "python") -> str:
    return f"So:\n```{language}\n{code}\n```\nThat is it."


def verdict(reward: CodeExecution, code: str, tests: str = TESTS) -> str:
    """What the samples tell of one completion; its score is checked against it."""
    told: dict[str, list[str]] = {}
    scores = reward([None], [block(code)], lambda name, values: told.update({name: values}), tests=[tests])
    assert scores == [float(told["code_execution"] == ["passed"])]
    return told["code_execution"][0]


@pytest.fixture(params=["namespaces", "plain"])
def reward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CodeExecution:
    """With namespaces where there are any, and as on systems without."""
    if request.param == "plain":
        monkeypatch.setattr(code_module, "namespaces", tuple)
    elif not namespaces():
        pytest.skip("this system gives no namespaces to users")
    tmp_path.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", None)
    return CodeExecution(allow_execution=True, timeout=20, memory_mb=256)


ENDS = {
    "right": (RIGHT, "passed"),
    "wrong": ("def double(x):\n    return x", "AssertionError"),
    "raises": ("raise ValueError('no')", "ValueError: no"),
    "syntax": ("def double(x: return", "SyntaxError"),
    "leaves with 0": ("import os\nos._exit(0)", "ended by itself before its tests did, with exit code 0"),
    "sys.exit(0)": ("import sys\nsys.exit(0)", "SystemExit"),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", "was ended by signal 9"),
    "kills its group": ("import os\nos.killpg(0, 9)", "was ended by signal 9"),
    "takes memory": ("x = 'a' * 2**30", "MemoryError"),
    "fills the disk": (f"open('a', 'w').write('x' * 2**25)\n{RIGHT}", "File too large"),
    "prints a megabyte": (f"import sys\nprint('x' * 2**20)\nprint('x' * 2**20, file=sys.stderr)\n{RIGHT}", "passed"),
    "reads the input": (f"import sys\nassert sys.stdin.read() == ''\n{RIGHT}", "passed"),
    "is a script": (f"{RIGHT}\nif __name__ == '__main__':\n    double = None", "TypeError"),
    "has a dataclass": (f"from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n{RIGHT}", "passed"),
    "opens many files": ("files = [open('a', 'w') for _ in range(1000)]", "Too many open files"),
    "closes what it reports on": (
        "import os\nfor fd in range(3, 64):\n    try: os.close(fd)\n    except OSError: pass",
        "",
    ),
    "comes back twice": (f"import os\ntry: os.fork()\nexcept OSError: pass\n{RIGHT}", "passed"),
}


@pytest.mark.parametrize(("code", "told"), ENDS.values(), ids=ENDS.keys())
def test_how_it_ends_is_told(reward, code, told):
    said = verdict(reward, code)
    assert told in said
    assert (said == "passed") == (told == "passed")


def test_a_loop_is_stopped(monkeypatch):
    reward = CodeExecution(allow_execution=True, timeout=0.5)
    assert verdict(reward, "while True: pass") == "took more than 0.5 seconds"
    assert verdict(reward, "import time\ntime.sleep(60)") == "took more than 0.5 seconds"


def test_it_has_a_folder_of_its_own_and_leaves_nothing(reward, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    here = "import os\nassert os.listdir() == [] and 'SECRET_TOKEN' not in os.environ\nopen('a', 'w').write('x')\n"
    assert verdict(reward, here + RIGHT) == "passed"
    assert verdict(reward, here + f"assert os.getcwd().startswith({str(tmp_path)!r})\n{RIGHT}") == "passed"
    assert not list(tmp_path.iterdir())


FORKS = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b'NAME', 0, 0, 0)
count = 0
while count < 20:
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        SETSID
        time.sleep(60)
        os._exit(0)
    count += 1
assert count <= 7, count
"""


THREADS = """
import threading
started, gate = 0, threading.Event()
while started < 20:
    try:
        threading.Thread(target=gate.wait, daemon=True).start()
    except RuntimeError:
        break
    started += 1
gate.set()
assert started <= 7, started
"""


def test_threads_count_as_processes(reward):
    assert verdict(reward, THREADS + RIGHT) == "passed"


@pytest.mark.parametrize("setsid", ["pass", "os.setsid()"], ids=["group", "own session"])
def test_processes_are_limited_and_none_is_left(reward, setsid):
    name = f"lr{os.getpid()}{len(setsid)}"
    assert verdict(reward, FORKS.replace("SETSID", setsid).replace("NAME", name) + RIGHT) == "passed"
    assert name not in running()


def running() -> set[str]:
    """Names of all processes."""
    names = set()
    for file in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            names.add(file.read_text().strip())
    return names


@pytest.mark.skipif(not namespaces(), reason="this system gives no namespaces to users")
def test_there_is_no_network_in_a_namespace():
    code = "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)"
    assert "unreachable" in verdict(CodeExecution(allow_execution=True), code)


def test_without_namespaces_a_warning_says_what_is_left_open(monkeypatch):
    monkeypatch.setattr(code_module, "namespaces", tuple)
    with pytest.warns(UserWarning, match="has your network"):
        CodeExecution(allow_execution=True)


def test_the_program_cannot_end_who_watches_it(reward):
    assert verdict(reward, "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(0.2)") != "passed"


def test_many_completions_keep_their_order():
    reward = CodeExecution(allow_execution=True, workers=3)
    codes = [RIGHT, "no", RIGHT, "1/0", RIGHT]
    rewards = Rewards(reward)
    columns = {"tests": [[TESTS, "assert True"], TESTS, None, TESTS, "assert double(1) == 3"]}
    scores = rewards.score([""] * 5, [*map(block, codes[:4]), RIGHT], columns)
    assert [None if v != v else v for v in scores.values[:, 0].tolist()] == [1.0, 0.0, None, 0.0, 0.0]
    assert scores.extras["code_execution"][::4] == ["passed", NO_CODE] and scores.extras["code_execution"][2] is None


BLOCKS = {
    "a\n```python\nx = 1\n```": "x = 1",
    "```\nx = 1\n```\n": "x = 1",
    "```py\nx = 1\n\ny = 2\n```": "x = 1\n\ny = 2",
    "```python\nfirst\n```\n```Python\nlast\n```": "last",
    "```python\nx = 1\n```\n```bash\nls\n```": "x = 1",
    "  ```python\n  x = 1\n  ```": "  x = 1",
    "```python\nx = 1": None,
    "```bash\nls\n```": None,
    "x = 1": None,
    "": None,
    "```python\n```": "",
    "```" * 10_000: None,
}


@pytest.mark.parametrize(("text", "expected"), BLOCKS.items())
def test_the_last_closed_block_counts(text, expected):
    assert last_block(text) == expected


@pytest.mark.parametrize(("tests", "told"), [(3, "tests of row 0 is 3"), ([1], "tests of row 0"), ([" "], "empty")])
def test_tests_are_texts(tests, told):
    with pytest.raises(RewardError, match=told):
        CodeExecution(allow_execution=True)([None], [block(RIGHT)], tests=[tests])


def test_a_column_that_is_not_there():
    with pytest.raises(RewardError, match=r"no column 'checks'.*tests"):
        CodeExecution(True, column="checks")([None], [block(RIGHT)], tests=[TESTS])


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BackendError, match="Linux"):
        CodeExecution(allow_execution=True)


def test_root_without_a_way_to_limit_its_processes_is_refused(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(code_module, "_runs", lambda prefix: False)
    monkeypatch.setattr(code_module, "namespaces", tuple)
    with pytest.raises(BackendError, match="setpriv"):
        CodeExecution(allow_execution=True)
