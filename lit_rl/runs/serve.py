"""`lit-rl serve`: vLLM's own server for a model, ready to be trained against, until a signal stops it."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lit_rl.core.errors import ConfigError, in_range
from lit_rl.core.http_client import HTTP_LOOP
from lit_rl.core.machine import is_loopback, require_vllm
from lit_rl.core.signals import exit_on_sigterm
from lit_rl.generation.vllm.engine_settings import (
    API_KEY_VARIABLE,
    EngineSettings,
    adapter_rank,
    api_key,
    model_arguments,
    model_dtype,
    runs_on_cpu,
)
from lit_rl.generation.vllm.launch import ServerProcess, checked_port, server_arguments, temporary_log
from lit_rl.models.language_model import LanguageModel

_LOOK_EVERY = 0.5
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Serve:
    """The model to serve, and the address."""

    model: LanguageModel
    settings: EngineSettings
    host: str = "127.0.0.1"
    port: int = 8000
    """Port; 0 is a free one."""
    log: str | None = None
    """File that the server's output is added to; None: a temporary one."""
    startup_timeout: float = 600.0
    """Seconds until it has to answer."""
    typed: Sequence[str] = field(default=())
    """Overrides of model and generator, which a run has to repeat."""


def serve(job: Serve) -> int:
    """Start the server, print how a run uses it, and stay until Ctrl-C, SIGTERM or its end.

    Raises:
        BackendError: vLLM is not installed.
        ConfigError: the port cannot be listened on, or a setting is out of range.
        GenerationError: the server did not start, or ended by itself; with the last lines of its output.
    """
    require_vllm("lit-rl serve")
    in_range("serve.startup_timeout", job.startup_timeout, low=0, open_low=True)
    if not job.host:
        raise ConfigError("serve.host is empty: give an address of this machine, such as 127.0.0.1.")
    server = _server(job)
    with exit_on_sigterm():
        try:
            server.start()
            server.wait_healthy(job.startup_timeout, _note)
            longest = HTTP_LOOP.wait(server.client.models(10.0)).get(job.model.label)
            overrides = ["generator=vllm_server", f"generator.urls=[{server.url}]", *job.typed]
            sys.stdout.write(
                f"Serving {job.model.name} at {server.url}, prompt and response together up to {longest} tokens. Give "
                f"the run\n    {shlex.join(overrides)}\nCtrl-C stops the server.\n"
            )
            sys.stdout.flush()
            while server.alive:
                time.sleep(_LOOK_EVERY)
            raise server.failure(f"The vLLM server at {server.url} ended.")
        finally:
            server.stop()


def _server(job: Serve) -> ServerProcess:
    cpu, model = runs_on_cpu(), job.model
    settings = job.settings
    if settings.max_lora_rank is None:
        settings = replace(settings, max_lora_rank=adapter_rank(model))
    engine = settings.engine_arguments(model_dtype=model_dtype(model), cpu=cpu) | model_arguments(model)
    port = checked_port(job.host, job.port, "serve.port")
    arguments = server_arguments(engine, name=model.label, host=job.host, port=port, transfer=None if cpu else "nccl")
    log = temporary_log() if job.log is None else Path(job.log).expanduser()
    reached = _EVERYWHERE.get(job.host, job.host)
    url = f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"
    if not is_loopback(job.host) and not api_key():
        raise ConfigError(
            f"serve.host={job.host} without a key: whoever reaches this port could replace the weights and run code in "
            f"the server. Set the environment variable {API_KEY_VARIABLE} to a secret, here and where the "
            "training runs, or listen on 127.0.0.1."
        )
    _note(f"Starting vLLM for {model.name} on port {port}; its output is in {log}")
    return ServerProcess(arguments, url=url, cpu=cpu, log=log)


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
