"""The server that a run starts for itself, and the search for servers that others start again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from lit_rl.errors import GenerationError
from lit_rl.generation.vllm import settings as vllm_settings
from lit_rl.generation.vllm.calls import ServerError
from lit_rl.generation.vllm.client import Client
from lit_rl.generation.vllm.launch import ServerProcess, checked_port, server_arguments, temporary_log
from lit_rl.generation.vllm.model_files import write_model_files
from lit_rl.generation.vllm.settings import EngineSettings
from lit_rl.generation.vllm.transports import at_once
from lit_rl.models.policy.device import device_of
from lit_rl.models.policy.language_model import LanguageModel

_LOOPBACK = "127.0.0.1"
_POLL = 0.5


class OwnServer:
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
            **vllm_settings.route_of_images(model),
        }
        port = checked_port(_LOOPBACK, 0, "generator.launch")
        transfer = None if cpu else "nccl"
        flags = server_arguments(engine, name=model.label, host=_LOOPBACK, port=port, transfer=transfer)
        path = temporary_log() if log is None else Path(log)
        self._place = "" if cpu else f" on {places(device_of(policy), settings)}"
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

    def death(self, what: str) -> GenerationError:
        """Return an error with the last lines of its log."""
        return self._process.death(what)

    def stop(self) -> None:
        self._process.stop()
        self._folder.cleanup()


def places(policy: torch.device, settings: EngineSettings) -> str:
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


def answering(urls: Sequence[str], deadline: float) -> list[str]:
    """Return the servers that answer, all asked at the same time, for at most `deadline` seconds."""
    return [url for url, error in _knocked(urls, deadline).items() if error is None]


def wait_for(urls: Sequence[str], deadline: float, answer_deadline: float) -> list[str]:
    """Return the servers that answer, as soon as one does, at most `deadline` seconds from now.

    Raises:
        ServerError: the error of the first server's last try.
    """
    until = time.monotonic() + deadline
    while True:
        tried = _knocked(urls, min(answer_deadline, max(_POLL, until - time.monotonic())))
        if there := [url for url, error in tried.items() if error is None]:
            return there
        if time.monotonic() > until:
            raise next(error for error in tried.values() if error is not None)
        time.sleep(_POLL)


def _knocked(urls: Sequence[str], deadline: float) -> dict[str, ServerError | None]:
    def knock(client: Client) -> ServerError | None:
        try:
            client.rpc("lit_rl_facts", deadline=deadline)
        except ServerError as error:
            return error
        return None

    return dict(zip(urls, at_once([Client(url) for url in urls], knock), strict=True))
