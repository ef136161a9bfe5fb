"""vLLM's own server as a process: its flags, start and log, and an end that leaves no process behind.

`LaunchedServer` is the one that a run starts for itself. `responsive_servers` and `wait_for_servers` look for those
that others start.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.http_client import HTTP_LOOP
from lit_rl.core.processes import Child, supervised
from lit_rl.generation.vllm import engine_settings as vllm_settings
from lit_rl.generation.vllm.client import Client, ServerError, on_all
from lit_rl.generation.vllm.engine_settings import (
    SERVER,
    APIKeyMiddleware,
    EngineSettings,
    api_key,
    engine_environment,
    write_model_files,
)
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.sharding import device_of

_POLL = 0.3
_SAY_EVERY = 10.0
_HEALTH_DEADLINE = 2.0
_LAST_LINES = 20
_TAIL_BYTES = 2**18

_EXCEPTION = re.compile(r"^(?:\([^)]*\) ERROR [^\]]*\] )?([\w.]*(?:Error|Exception): .+)")
"""The line that names an exception, as Python prints it and as vLLM's log repeats it for its other processes."""


class ServerProcess:
    """vLLM's server and all its processes, in a session of their own.

    They end with `stop`, when this process ends, and also when it is killed.

    Args:
        arguments: Flags, of `server_arguments`.
        url: Its address, from this machine.
        cpu: True where vLLM runs on a CPU.
        log: File to which its output is appended.
        grace: Seconds between SIGTERM and SIGKILL when it is stopped.
    """

    def __init__(self, arguments: Sequence[str], *, url: str, cpu: bool, log: Path, grace: float = 10.0) -> None:
        self.arguments = list(arguments)
        self.client = Client(url)
        self.url, self.log = self.client.url, Path(log)
        self._cpu, self._grace = cpu, grace
        self._child: Child | None = None
        self._log_start = 0

    def start(self) -> None:
        """Start the server; see `wait_healthy`.

        Raises:
            GenerationError: it runs already, or the log cannot be written.
        """
        if self.alive:
            raise GenerationError(f"The server at {self.url} runs already.")
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self.arguments]
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                self._log_start = log.tell()
                self._child = Child(
                    supervised(server, self._grace),
                    grace=self._grace + 5,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=server_environment(self._cpu),
                )
        except OSError as error:
            raise GenerationError(f"The server cannot be started with its output in {self.log}: {error}.") from error

    @property
    def alive(self) -> bool:
        """Tell whether the server process runs; it may not answer yet."""
        return self._child is not None and self._child.alive

    @property
    def group(self) -> int | None:
        """The id of its process group; None where it was not started, or was stopped."""
        return None if self._child is None else self._child.process.pid

    def wait_healthy(self, deadline: float, say: Callable[[str], None] | None = None) -> None:
        """Wait until the server answers; stop it and raise otherwise.

        Args:
            deadline: Seconds.
            say: Gets a line about every ten seconds.

        Raises:
            GenerationError: it ended, or the deadline came; with the last lines of its log.
        """
        started = time.monotonic()
        next_line = started + _SAY_EVERY
        while True:
            if not self.alive:
                self.stop()
                raise self.failure(f"The vLLM server for {self.url} ended before it was ready.")
            try:
                return HTTP_LOOP.wait(self.client.health(_HEALTH_DEADLINE))
            except ServerError:
                now = time.monotonic()
            if now - started > deadline:
                self.stop()
                raise self.failure(f"The vLLM server for {self.url} was not ready within {deadline:g} seconds.")
            if say is not None and now >= next_line:
                say(f"The vLLM server is starting, {now - started:.0f} s so far; its output is in {self.log}")
                next_line = now + _SAY_EVERY
            time.sleep(_POLL)

    def stop(self) -> None:
        """End it with all its processes, and wait until they are gone. May be called again, and before `start`."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def tail(self, lines: int = _LAST_LINES) -> list[str]:
        """Return the last lines of its output since it started."""
        return self._lines()[-lines:]

    def failure(self, what: str) -> GenerationError:
        """Return an error with the log's first exception, the usual cause of the last lines, and these."""
        found = self._lines()
        last = found[-_LAST_LINES:]
        cause = next((match.group(1) for line in found if (match := _EXCEPTION.match(line))), None)
        first = f"\nIts first error: {cause}" if cause is not None else ""
        output = "\n".join(f"    {line}" for line in last) or "    (nothing)"
        return GenerationError(f"{what}{first}\nThe last lines of {self.log}:\n{output}")

    def _lines(self) -> list[str]:
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._log_start, self.log.stat().st_size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        printable = ("".join(c if c.isprintable() else " " for c in line).rstrip() for line in text.splitlines())
        return [line for line in printable if line]


def server_environment(cpu: bool) -> dict[str, str]:
    """Return this process's environment with the variables of a server: vLLM's switches, and our worker extension on
    its path."""
    ours = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(part for part in (ours, os.environ.get("PYTHONPATH")) if part)
    own = {name: value for name, value in os.environ.items() if name not in _OF_THIS_RUN}
    return {**own, **engine_environment(cpu), **SERVER, "PYTHONPATH": path}


_OF_THIS_RUN = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)
"""Variables of this process's own group, and of an engine in this process."""


def server_arguments(
    engine: Mapping[str, Any], *, name: str, host: str, port: int, transfer: str | None = None
) -> list[str]:
    """Return the flags of vLLM's OpenAI-compatible server. Where the environment has a key, every route requires it.

    Args:
        engine: Engine arguments by vLLM's names, with those of `model_arguments`.
        name: The model's name in requests.
        host: Address to listen on.
        port: Port to listen on.
        transfer: vLLM's weight-transfer engine, such as "nccl"; None: weights arrive by file or by our worker's
            methods.
    """
    flags = {**engine, "served_model_name": name, "host": host, "port": port, "uvicorn_log_level": "warning"}
    if transfer is not None:
        flags["weight_transfer_config"] = {"backend": transfer}
    if api_key():
        flags["middleware"] = f"{APIKeyMiddleware.__module__}.{APIKeyMiddleware.__name__}"
    words = ["--disable-uvicorn-access-log"]
    for key, value in flags.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            # In one word, so that a value which begins with a dash is no flag.
            words.append(f"--{flag}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return words


def checked_port(host: str, port: int, key: str) -> int:
    """Return ``port``, or a free one for 0, after a test that it can be listened on: vLLM would fail after its slow
    start.

    Raises:
        ConfigError: it is taken, may not be used, or ``host`` is no address of this machine.
    """
    if not 0 <= port < 2**16:
        raise ConfigError(f"{key}={port} is no port: allowed is 0 (a free one) to 65535.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed is free
        try:
            listener.bind((host, port))
            listener.listen(1)
        except OSError as error:
            raise ConfigError(
                f"{key}={port} on {host} cannot be listened on: {error.strerror or error}. Is another server running "
                f"there? {key}=0 takes a free port."
            ) from error
        return int(listener.getsockname()[1])


def temporary_log() -> Path:
    """Return a new file for a server's output, where there is no run directory."""
    handle, path = tempfile.mkstemp(prefix="lit_rl_vllm_", suffix=".log")
    os.close(handle)
    return Path(path)


# ------------------------------------------------------------------ the server of a run

_LOOPBACK = "127.0.0.1"


class LaunchedServer:
    """A server for a policy, on this machine and a free port. It begins without weights: they are sent.

    Args:
        policy: The model with the config.
        model: The description with tokenizer and processor.
        settings: Settings of the engine.
        log: File for its output; None is a temporary one.
    """

    def __init__(self, policy: nn.Module, model: LanguageModel, settings: EngineSettings, log: str | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lit_rl_model_")
        write_model_files(policy, model, self._folder.name)
        cpu = vllm_settings.runs_on_cpu()
        engine = settings.engine_arguments(model_dtype="auto", cpu=cpu) | {
            "model": self._folder.name,
            "load_format": "dummy",
            "trust_remote_code": model.trust_remote_code,
            **vllm_settings.image_route(model),
        }
        port = checked_port(_LOOPBACK, 0, "generator.launch")
        transfer = None if cpu else "nccl"
        flags = server_arguments(engine, name=model.label, host=_LOOPBACK, port=port, transfer=transfer)
        path = temporary_log() if log is None else Path(log)
        self._place = "" if cpu else f" on {describe_gpus(device_of(policy), settings)}"
        self._process = ServerProcess(flags, url=f"http://{_LOOPBACK}:{port}", cpu=cpu, log=path)

    @property
    def url(self) -> str:
        return self._process.url

    @property
    def group(self) -> int | None:
        """The id of its process group; None where it does not run."""
        return self._process.group

    def start(self, deadline: float, say: Callable[[str], None]) -> None:
        """Start it, or stop it and start it again, and wait until it answers.

        Raises:
            GenerationError: it did not come up within `deadline` seconds; with the last lines of its log.
        """
        self._process.stop()
        say(f"Starting a vLLM server at {self.url}{self._place}; its output is in {self._process.log}")
        self._process.start()
        self._process.wait_healthy(deadline, say)

    def failure(self, what: str) -> GenerationError:
        """Return an error with the last lines of its log."""
        return self._process.failure(what)

    def stop(self) -> None:
        self._process.stop()
        self._folder.cleanup()


def describe_gpus(policy: torch.device, settings: EngineSettings) -> str:
    """Return a description of vLLM's GPUs, the first visible ones, and of their other users."""
    size = settings.tensor_parallel_size
    taken = "the first visible GPU" if size == 1 else f"the first {size} visible GPUs"
    if policy.type != "cuda" or (policy.index or 0) >= size:
        return taken
    share = settings.gpu_memory_utilization
    return (
        f"{taken}, beside the training (generator.gpu_memory_utilization={share:g}; for GPUs of its own, start it by "
        "CUDA_VISIBLE_DEVICES=... lit-rl serve, and name it in generator.urls)"
    )


# ------------------------------------------------------------------ servers of others

_RETRY_SECONDS = 0.5


def responsive_servers(urls: Sequence[str], deadline: float) -> list[str]:
    """Return the servers that answer, all asked at the same time, for at most `deadline` seconds."""
    return [url for url, error in _try_servers(urls, deadline).items() if error is None]


def wait_for_servers(urls: Sequence[str], deadline: float, answer_deadline: float) -> list[str]:
    """Return the servers that answer, as soon as one does, at most `deadline` seconds from now.

    Raises:
        ServerError: the error of the first server's last try.
    """
    until = time.monotonic() + deadline
    while True:
        tried = _try_servers(urls, min(answer_deadline, max(_RETRY_SECONDS, until - time.monotonic())))
        if answering := [url for url, error in tried.items() if error is None]:
            return answering
        if time.monotonic() > until:
            raise next(error for error in tried.values() if error is not None)
        time.sleep(_RETRY_SECONDS)


def _try_servers(urls: Sequence[str], deadline: float) -> dict[str, ServerError | None]:
    async def try_server(client: Client) -> ServerError | None:
        try:
            await client.rpc("lit_rl_facts", deadline=deadline)
        except ServerError as error:
            return error
        return None

    return dict(zip(urls, HTTP_LOOP.wait(on_all([Client(url) for url in urls], try_server)), strict=True))
