"""A reward for code that passes its tests, by running it. Off unless allowed by name: it is no sandbox."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import BackendError, ConfigError, RewardError
from lit_rl.core.processes import Child, kill_group
from lit_rl.ops.ranges import AtLeastOne, Positive, Range
from lit_rl.rewards.contract import Completion, text_of
from lit_rl.rewards.sandbox import FIRST_UID, Bubblewrap, fresh_uid

_RUNNER = str(Path(__file__).with_name("code_runner.py"))
_LANGUAGES = ("", "python", "python3", "py")
_GRACE = 15.0
NO_CODE = "no code block"
Runner = Literal["process", "bubblewrap"]


@checked("")
class CodeExecution:
    """1 where the completion's last Python code block runs and passes the row's tests; else 0.

    The block and the tests (Python text: assert statements, or whatever raises on failure) run in fresh
    interpreters with the packages of this environment. They have an empty folder as their current one, a bare
    environment without your variables, no output, and limits on time, memory, processes, open files (64) and the
    size of a file (16 MiB); then they and all that they started are killed. Two runners:

    ``process``: block and tests in one interpreter. Where the system allows namespaces (``unshare``) it has no
    network; otherwise there is a warning. Started by root it becomes a user without a name (``setpriv``), since the
    processes of root cannot be limited. **It is no sandbox**: the code can read all files that you can, and write
    them too unless you are root; it can fill /tmp and /dev/shm; its memory is limited for each process, not for all
    together; and code that sets out to cheat can pretend to have passed, by the frames of the interpreter that it
    shares with its judge. It protects the training from accidents, not from attacks.

    ``bubblewrap``: block and tests in two sandboxes of ``bwrap``, each with files, processes, shared memory and
    network of its own. They see the system's programs (/usr), the interpreter and its packages, and can write none
    of them; its folder is the memory of /tmp, of 64 MiB; processes together may hold ``memory_mb``, checked every
    20 ms; system calls that make namespaces, or hold memory out of sight, are refused. The tests get copies of
    plain values (None, numbers, texts, bytes, lists, tuples, dicts, sets), changed arguments included; an object of
    the program's own class stays with it, can be used, and can be compared with another of its objects, not with a
    plain value. Built-in names and modules in tests are never the program's. Tests that need more (the program's
    source, its global variables as they change, sub-classes of its classes, ``await``) fail.

    What it does not stop: holes of the kernel; reading what lies under /usr and beside the packages; a
    right-looking answer by an object's own ``==``, where tests compare two objects of the program; guessing, where
    tests take any of few answers; memory that grows between two checks (at most ``memory_mb`` for each process), and
    the kernel's own, such as a million empty files. No cgroup is used: most systems let a user make none.

    Run either in a container or a virtual machine that holds nothing of value.

    A completion without a closed code block is worth 0; a row whose tests are None gives None. What happened to each
    completion is logged as the column ``code_execution`` of the samples.

    Args:
        allow_execution: Must be true: you want code written by a model to run on this machine.
        column: The column of the tests, a text or a list of texts.
        timeout: Seconds that one completion and its tests may take.
        memory_mb: Address space of each process, in MiB.
        max_processes: Processes and threads at a time, the first one included. Without namespaces, those of an ordinary
            user that run anyway count too, so that the code may start none.
        workers: Completions that run at the same time.
        runner: ``process``, or ``bubblewrap`` where that is installed.

    Raises:
        ConfigError: ``allow_execution`` is not true, or a setting is out of range.
        BackendError: this is not Linux, the processes that root starts cannot be limited, or ``bwrap`` is not
            installed or cannot make its namespaces here.
    """

    def __init__(
        self,
        allow_execution: bool = False,
        column: str = "tests",
        timeout: Positive = 5.0,
        memory_mb: Annotated[int, Range(64, whole=True)] = 1024,
        max_processes: AtLeastOne = 8,
        workers: AtLeastOne = 4,
        runner: Runner = "process",
    ) -> None:
        if allow_execution is not True:
            raise ConfigError(
                f"allow_execution={allow_execution}: this reward runs code that the model writes, as you and on this "
                "machine, and is no sandbox. Where that is what you want, in a container for example, set it to true."
            )
        if not sys.platform.startswith("linux"):
            raise BackendError("CodeExecution needs Linux, for its limits on processes and memory.")
        self.column = column
        self.workers = workers
        self.timeout = timeout
        self.runner = Bubblewrap(timeout, memory_mb, max_processes) if runner == "bubblewrap" else None
        if self.runner is not None:
            self.runner.check()
        else:
            if os.geteuid() == 0 and not _runs(_other_user(FIRST_UID)):
                raise BackendError(
                    "CodeExecution: root may start any number of processes, and setpriv (util-linux) does not work "
                    "here, by which the code would become another user. Run as an ordinary user."
                )
            if not namespaces():
                warnings.warn(
                    "CodeExecution: this system gives no namespaces to users (unshare), so the code has your network.",
                    stacklevel=2,
                )
            # Those that watch are counted too: the script, and the `unshare` of an ordinary user.
            watching = 2 if namespaces() and os.geteuid() != 0 else 1
            self.limits = {"seconds": timeout, "memory_mb": memory_mb, "processes": max_processes + watching}

    independent_rows = True
    """It runs completions that are over while others are still written."""

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        if self.column not in columns:
            found = ", ".join(columns) or "none"
            raise RewardError(f"the data has no column {self.column!r} with the tests (column=...); it has: {found}.")
        tests = [_checked_tests(self.column, row, value) for row, value in enumerate(columns[self.column])]
        blocks = [last_block(text_of(completion)) for completion in completions]
        with ThreadPoolExecutor(self.workers) as pool:
            verdicts = list(pool.map(self._verdict, blocks, tests))
        if log_extra is not None:
            log_extra("code_execution", verdicts)
        return [None if verdict is None else float(verdict == "passed") for verdict in verdicts]

    def _verdict(self, code: str | None, tests: list[str] | None) -> str | None:
        """Return `passed`, or a short reason for the failure; None where the row has no tests."""
        if tests is None:
            return None
        if code is None:
            return NO_CODE
        if self.runner is not None:
            return self.runner.verdict(code, tests)
        with tempfile.TemporaryDirectory(prefix="lit_rl_code_", ignore_cleanup_errors=True) as folder:
            environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
            command = [*namespaces(), sys.executable, "-I", _RUNNER]
            if os.geteuid() == 0:
                uid = fresh_uid()
                os.chown(folder, uid, uid)
                command = [*namespaces(), *_other_user(uid), sys.executable, "-I", _RUNNER]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            runner = Child(command, cwd=folder, env=environment, **pipes)
            request = json.dumps({"code": code, "tests": tests, **self.limits})
            with contextlib.suppress(subprocess.TimeoutExpired):
                runner.process.communicate(request.encode(), timeout=self.timeout + _GRACE)
            runner.end()
            answer, _ = runner.process.communicate()
            program, _, verdict = answer.decode().partition("\n")
            if program and not namespaces():  # its number is one of this system
                kill_group(int(program))
        return json.loads(verdict) if verdict else "ended the process that watched it"


def _checked_tests(column: str, row: int, value: Any) -> list[str] | None:
    tests = [value] if isinstance(value, str) else value
    if tests is None:
        return None
    if not isinstance(tests, list | tuple) or not all(isinstance(test, str) for test in tests):
        raise RewardError(f"{column} of row {row} is {value!r:.80}; allowed are a text, a list of texts, or None.")
    if not any(test.strip() for test in tests):
        raise RewardError(f"{column} of row {row} is empty, and whatever runs would pass. Use None to skip a row.")
    return list(tests)


def last_block(text: str) -> str | None:
    """Return the content of the last closed block between fences of three backticks, of Python or no language; else
    None."""
    found: str | None = None
    language, lines = None, []
    for line in text.splitlines():
        if not line.lstrip().startswith("```"):
            lines.append(line)
        elif language is None:
            language, lines = line.strip().strip("`").strip().lower(), []
        else:
            found = "\n".join(lines) if language in _LANGUAGES else found
            language = None
    return found


@functools.cache
def namespaces() -> tuple[str, ...]:
    """Return the command prefix for a network (none) and processes of its own; empty where that is not allowed."""
    rights = () if os.geteuid() == 0 else ("--map-root-user",)
    command = ("unshare", *rights, "--net", "--pid", "--fork", "--kill-child", "--")
    return command if _runs(command) else ()


def _other_user(uid: int) -> tuple[str, ...]:
    """Return the command prefix by which root runs it as another user, who may read all files and nothing else."""
    capabilities = "-all,+dac_read_search"  # the interpreter may lie where only root looks
    user = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs")
    return ("setpriv", *user, f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}", "--")


@functools.cache
def _runs(prefix: tuple[str, ...]) -> bool:
    if shutil.which(prefix[0]) is None:
        return False
    try:
        return (
            subprocess.run([*prefix, sys.executable, "-I", "-c", ""], capture_output=True, timeout=60).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
