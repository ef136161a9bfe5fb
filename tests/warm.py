"""Python processes that begin with the libraries loaded, which takes seven seconds of a core: each is forked from one
that has loaded them and has done nothing else.

`Popen` is as the one of `subprocess`: what it starts has its own id, session, streams, environment, signals and exit
code, and ends as Python ends. Two things differ. Its parent is the process that it was forked from, so a rank is not
told who has started it. And Python draws the seed by which it hashes texts (PYTHONHASHSEED) once an interpreter: all
that are forked from one have the same, and go through a set of texts in the same order. Ranks that a user starts do
not, so code that takes such an order for the same on every rank would pass here and fail there. So what starts the
ranks of `dist_jobs`, and the commands of the documentation, starts new interpreters. What cannot be forked is a new
interpreter too: see `_fit`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

_WHERE = "WARM_SOCKET"
"""Names the socket to those that are forked, whose own ranks are forked too."""
_READ_AT_LOADING = ("GLIBC", "HF_", "LD_", "MALLOC_", "MKL_", "OMP_NUM", "PYTHON", "TORCH_", "TRANSFORMERS_")
_STREAMS = 3
_ANSWERS = 300.0
"""Seconds that who asks waits for the fork, which takes hundredths of one on a quiet machine."""
_ARROWS = "jemalloc_bg_thd"
"""A thread that gives memory of pyarrow's back; jemalloc's own handlers of a fork do without it."""
LOADED = ("lit_rl.cli.hydra_app", "lit_rl.cli.hydra_start", "peft", "transformers.models.qwen2.modeling_qwen2")
_BEGUN = dict(os.environ)
"""As the tests began: what later tests set for a moment is not for every process."""


def _of_loading(environment: Mapping[str, str]) -> dict[str, str]:
    """What libraries read when they are loaded: it has to be as it was then, but for what `_begun` tells them."""
    chosen = {name: value for name, value in environment.items() if name.startswith(_READ_AT_LOADING)}
    return {name: value for name, value in chosen.items() if name not in ("HF_HUB_OFFLINE", "PYTHONPATH")}


_GIVEN = tuple(signature(subprocess.Popen._execute_child).parameters)


class Popen(subprocess.Popen):
    """`subprocess.Popen`; see above."""

    _told: socket.socket | None = None

    def _execute_child(self, *given: Any) -> None:
        of = dict(zip(_GIVEN, (self, *given)))
        environment = dict(os.environ if of["env"] is None else of["env"])
        if not _fit(of, environment):
            return super()._execute_child(*given)
        own = [of[name] if of[name] != -1 else place for place, name in enumerate(("p2cread", "c2pwrite", "errwrite"))]
        words = list(map(os.fspath, of["args"]))[1:]
        asked = [words, environment, os.path.abspath(of["cwd"] or "."), bool(of["start_new_session"])]
        self._told = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._told.connect(_socket())
        except OSError:  # who forked this process has ended in between
            self._told = None
            return super()._execute_child(*given)
        self._told.settimeout(_ANSWERS)
        message = json.dumps(asked).encode()
        socket.send_fds(self._told, [struct.pack("!i", len(message))], own)
        self._told.sendall(message)
        self.pid, self._child_created = self._number(), True
        self._close_pipe_fds(*(of[each] for each in _ENDS))

    def _number(self) -> int:
        assert self._told
        try:
            told = self._told.recv(4, socket.MSG_WAITALL)
        except TimeoutError:
            raise RuntimeError(f"no process was forked in {_ANSWERS:g} s: who forks is stopped, or hangs") from None
        assert len(told) == 4, "the process that forks is gone"
        return struct.unpack("!i", told)[0]

    def _internal_poll(self, *given: Any, **more: Any) -> int | None:
        if self._told is None:
            return super()._internal_poll(*given, **more)
        with self._waitpid_lock:  # Lightning's observer and ours ask beside the one who waits
            if self.returncode is None and select.select([self._told], [], [], 0)[0]:
                self.returncode = os.waitstatus_to_exitcode(self._number())
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._told is None:
            return super()._wait(timeout)
        if self.returncode is None and not select.select([self._told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._internal_poll() or 0


_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def run(command: Sequence[str], *, timeout: float | None = None, **given: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with `capture_output` and `text`."""
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **given) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _fit(of: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Whether a fork does: a script or code for this interpreter, with what libraries read as it was."""
    args = of["args"]
    if isinstance(args, str | bytes | os.PathLike) or len(args) < 2 or args[0] != sys.executable:
        return False
    script = str(args[1])
    if not (script.endswith(".py") or (script == "-c" and _WHERE not in os.environ)):
        return False
    if of["shell"] or of["preexec_fn"] or of["pass_fds"] or of["executable"] not in (None, sys.executable):
        return False
    return hasattr(os, "pidfd_open") and _of_loading(environment) == _of_loading(_BEGUN)


_server: list[str] = []


def _socket() -> str:
    """Where the process that forks listens. It is started when it is first asked for, and ends with this one."""
    if _WHERE in os.environ:
        return os.environ[_WHERE]
    if not _server:
        folder = tempfile.TemporaryDirectory(prefix="lit_rl_warm_")
        path = f"{folder.name}/socket"
        command = [sys.executable, __file__, path]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, env=_BEGUN, start_new_session=True, **pipes)
        assert process.stdin and process.stdout and process.stdout.readline() == b"ready\n"
        atexit.register(_ended, process, folder)
        _server.append(path)
    return _server[0]


def _ended(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.communicate()
    folder.cleanup()


def main(path: str) -> None:
    """Load what runs load, and fork for whoever asks, until standard input is closed."""
    for name in LOADED:
        importlib.import_module(name)
    threads = [each.read_text().strip() for each in Path("/proc/self/task").glob("*/comm")]
    assert len(threads) - threads.count(_ARROWS) == 1, f"a thread is not forked along: {threads}"
    gc.collect()
    gc.freeze()
    words = _asked(path)
    script, module = words[0], types.ModuleType("__main__")
    if script == "-c":
        code, name = words.pop(1), "<string>"
    else:
        code, name = Path(script).read_text(), script
        module.__file__ = script
    sys.argv = words
    sys.modules["__main__"] = module
    exec(compile(code, name, "exec"), module.__dict__)


def _asked(path: str) -> list[str]:
    """Returns in each process that is forked, with its words; and leaves where standard input ends."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen(16)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    started: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([0, listening, *started], [], [])[0]:
            if ready == 0:
                shutil.rmtree(Path(path).parent, ignore_errors=True)
                os._exit(0)
            if ready is not listening:
                process, told = started.pop(ready)
                with contextlib.suppress(OSError):  # who asked may have been killed
                    told.send(struct.pack("!i", os.waitpid(process, 0)[1]))
                os.close(ready)
                told.close()
                continue
            told, _ = listening.accept()
            size, streams, *_ = socket.recv_fds(told, 4, _STREAMS)
            if len(size) < 4:  # killed before it had asked
                told.close()
                continue
            message = told.recv(struct.unpack("!i", size)[0], socket.MSG_WAITALL)
            process = os.fork()
            if process == 0:
                listening.close()
                for descriptor, (_, other) in started.items():
                    os.close(descriptor)
                    other.close()
                return _begun(*json.loads(message), streams, path, told)
            for stream in streams:
                os.close(stream)
            started[os.pidfd_open(process)] = process, told


def _stream(place: int, before: Any) -> io.TextIOWrapper:
    """As Python opens it: one that cannot be told apart from a new one."""
    if place == 0:
        return open(place, encoding=before.encoding, errors=before.errors, closefd=False)
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    raw = io.FileIO(place, "wb", closefd=False)
    lines = place == 2 or os.isatty(place)
    binary: Any = raw if at_once else io.BufferedWriter(raw)
    return io.TextIOWrapper(binary, before.encoding, before.errors, line_buffering=lines, write_through=at_once)


def _begun(
    words: list[str], environment: dict[str, str], folder: str, apart: bool, streams: list[int], path: str, told: Any
) -> list[str]:
    """Be the process that was asked for, and say so."""
    if apart:
        os.setsid()
    for place, (name, stream) in enumerate(zip(("stdin", "stdout", "stderr"), streams)):
        os.dup2(stream, place)
        os.close(stream)
        setattr(sys, name, _stream(place, getattr(sys, name)))
        setattr(sys, f"__{name}__", getattr(sys, name))
    os.chdir(folder)
    ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(environment, **{_WHERE: path})
    os.environ.pop("LIT_RL_STARTED_BY", None)  # a rank that watches its parent: see `lit_rl.runs.rank_processes`
    offline = environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "TRUE", "YES")
    for name in {"huggingface_hub.constants", "datasets.config"} & set(sys.modules):
        sys.modules[name].HF_HUB_OFFLINE = offline
    given = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    first = "" if words[0] == "-c" else str(Path(words[0]).resolve().parent)
    sys.path[:] = [first, *given, *(each for each in sys.path[1:] if each not in ours)]
    subprocess.Popen = Popen  # for Lightning's launcher
    with contextlib.suppress(OSError):
        told.send(struct.pack("!i", os.getpid()))
    told.close()
    return words


if __name__ == "__main__":
    main(sys.argv[1])
