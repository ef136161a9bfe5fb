"""Processes that are forked are as those that Python starts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import warm

pytestmark = [pytest.mark.all, pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="nothing is forked here")]

SAYS = """
import atexit, json, os, subprocess, sys, threading
atexit.register(print, "at the end")
sys.stderr.write("beside\\n")
alone = subprocess.run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"], capture_output=True)
print(json.dumps({
    "argv": sys.argv, "path": sys.path[:2], "cwd": os.getcwd(), "one": os.environ.get("ONE"), "pid": os.getpid(),
    "session": os.getsid(0), "loaded": "torch" in sys.modules, "threads": threading.active_count(),
    "file": globals().get("__file__"), "name": __name__, "main": sys.modules["__main__"].__dict__ is globals(),
    "child": alone.stdout.decode(),
}))
sys.exit(7)
"""


@pytest.mark.parametrize("kind", ["-c", "script"])
def test_words_streams_environment_folder_session_and_exit_code_are_its_own(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "says.py"
    script.write_text(SAYS)
    command = [sys.executable, *(["-c", SAYS] if kind == "-c" else [str(script)]), "a word"]
    given = {"cwd": tmp_path, "env": {**os.environ, "ONE": "1", "PYTHONPATH": "/mine"}, "start_new_session": True}
    found = []
    for popen in (warm.Popen, subprocess.Popen):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with popen(command, **pipes, **given) as process:  # pyright: ignore
            out, err = process.communicate(timeout=120)
        said, last = out.splitlines()
        found.append(json.loads(said))
        assert (process.returncode, process.poll(), err, last) == (7, 7, "beside\n", "at the end")
        assert found[-1].pop("pid") == found[-1].pop("session") == process.pid
    assert [each.pop("loaded") for each in found] == [True, False]
    assert found[0] == found[1] and found[0]["child"] == "False\n"


def test_a_signal_ends_it_and_what_it_raised_is_told() -> None:
    with warm.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        with ThreadPoolExecutor(8) as threads:  # as those who watch other ranks
            asked = [threads.submit(process.wait, 30) for _ in range(8)]
            process.terminate()
            assert [each.result() for each in asked] == [-signal.SIGTERM] * 8
    done = warm.run([sys.executable, "-c", "1 / 0"])
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n") and not done.stdout


def test_who_asked_may_be_killed_before_the_answer(tmp_path: Path) -> None:
    """As rank 0 is, whose rank 1 ends after it: others are forked as before."""
    (tmp_path / "second.py").write_text("import time; time.sleep(1.0)")
    first = tmp_path / "first.py"
    first.write_text(
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, sys.argv[1]]).pid, flush=True)\n"
        "time.sleep(60)"
    )
    words = [sys.executable, str(first), str(tmp_path / "second.py")]
    with warm.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        second = int(process.stdout.readline())
        process.kill()
    until = time.monotonic() + 30
    while Path(f"/proc/{second}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    done = warm.run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"])
    assert done.stdout == "True\n"


def test_who_asks_what_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARM_SOCKET", str(tmp_path / "socket"))
    monkeypatch.setattr(warm, "_ANSWERS", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        with pytest.raises(RuntimeError, match="no process was forked in 0.1 s: who forks is stopped, or hangs"):
            warm.Popen([sys.executable, "any.py"])


@pytest.mark.parametrize("offline", ["0", "1"])
def test_whether_the_hub_is_asked_is_told(offline: str) -> None:
    code = "import sys, huggingface_hub; print('torch' in sys.modules, huggingface_hub.is_offline_mode())"
    done = warm.run([sys.executable, "-c", code], env={**os.environ, "HF_HUB_OFFLINE": offline})
    assert done.stdout == f"True {offline == '1'}\n"


@pytest.mark.parametrize("change", [{"env": {"HF_ENDPOINT": "https://hub.invalid"}}, {"preexec_fn": lambda: None}])
def test_what_only_a_new_interpreter_can_be_is_one(change: dict) -> None:
    given = {**change, "env": {**os.environ, **change.get("env", {})}}
    done = warm.run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"], **given)
    assert done.stdout == "False\n"
