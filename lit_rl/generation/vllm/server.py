"""vLLM's own server, on this machine or another: `generator=vllm_server`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from lit_rl.core import ranks
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.interrupts import interruptible
from lit_rl.core.machine import require_vllm
from lit_rl.generation.generator import EngineLost
from lit_rl.generation.vllm.client import Client, ServerError
from lit_rl.generation.vllm.engine import Engine, EngineWork
from lit_rl.generation.vllm.engine_generator import EngineGenerator
from lit_rl.generation.vllm.launch import LaunchedServer, responsive_servers, wait_for_servers
from lit_rl.generation.vllm.server_engine import ServerEngine
from lit_rl.generation.vllm.transports import transport_for
from lit_rl.models.sharding import device_of
from lit_rl.ops.ranges import AtLeastZero, Positive

_LOST_DEADLINE = 2.0
"""Deadline in seconds for a lost server to answer at an update."""


@checked("generator")
class VLLMServerGenerator(EngineGenerator):
    """A generator with vLLM's servers, started by `lit-rl serve` or by the trainer. Every rank asks them for its own
    prompts.

    A server that dies, hangs or was restarted is detected within the deadlines. Where others are left, they get its
    open requests, and it is tried again at every update of the weights. The last one is started again, or waited for,
    once, synced and asked again. Else the run ends with exit code 5, a checkpoint and the server's last lines.

    The life of the servers:

    ============================  ===================================================================================
    at the first sync             `_start`: `_launch` one where that is asked for, then `_connect_first`
    one of several is lost        `ServerEngine` continues without it; `EngineLost` where it was the last one
    at every later sync           `_revise_servers`: lost ones out, those that answer again in, by `_switch_to`
    `EngineLost`                  `_with_recovery`: `_restart_own`, `_wait_for_servers`, `_reconnect`; once more
    `EngineLost` once more        `_failure`: the end, with the last lines of the log of a server of ours
    ============================  ===================================================================================

    Args:
        urls: Addresses of the servers, such as ``[http://127.0.0.1:8000]``. A request goes to the least loaded one.
        launch: Start a server for the run, on this machine and a free port, and stop it with the run.
        log: File for the output of a server that was launched. None is a temporary one.
        transport: Transport of the weights: "shared_memory" (servers on this machine), "gloo", "nccl"; "auto" takes
            shared memory where it can, else NCCL where this process has a GPU, else gloo.
        deadline: Seconds for a completion from its request: a rollout without `env=` requests all at once.
        answer_deadline: Seconds for any other call, and the longest silence of a server.
        start_deadline: Seconds for a server to start, or to come back.
        lag: Rollouts that are drawn ahead with older weights while the policy learns. From 2 on, of one process.
        shared: Arguments of `EngineGenerator`; those of the engine apply to a launched server.

    Raises:
        ConfigError: a setting out of range, or neither `urls` nor `launch`.
        BackendError: a server is to be launched and vLLM is not installed.
    """

    def __init__(
        self,
        *,
        urls: Sequence[str] = (),
        launch: bool = False,
        log: str | None = None,
        transport: Literal["auto", "shared_memory", "gloo", "nccl"] = "auto",
        deadline: Positive = 3600.0,
        answer_deadline: Positive = 60.0,
        start_deadline: Positive = 600.0,
        lag: AtLeastZero = 0,
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        if isinstance(urls, str):
            raise ConfigError(f"generator.urls={urls!r} is a string; it takes a list of addresses: [{urls}].")
        self.urls, self.launch, self.log = [Client(url).url for url in urls], launch, log
        self.transport, self.lag = transport, lag
        self.deadline, self.answer_deadline, self.start_deadline = deadline, answer_deadline, start_deadline
        if launch == bool(self.urls):
            raise ConfigError(
                f"generator.urls={self.urls} with generator.launch={str(launch).lower()}: name the servers that run "
                "(generator.urls=[http://127.0.0.1:8000], as `lit-rl serve` prints it), or let the run start one "
                "(generator.launch=true)."
            )
        if transport == "nccl" and len(self.urls) > 1:
            raise ConfigError("generator.transport=nccl sends to one server: name one in generator.urls, or take gloo.")
        if launch and transport == "nccl":
            raise ConfigError(
                "generator.transport=nccl with generator.launch=true: the server starts on a GPU of the training, and "
                "NCCL refuses two processes on one GPU. Take generator.transport=shared_memory (auto does), or start "
                "the server on another GPU (CUDA_VISIBLE_DEVICES=1 lit-rl serve) and name it in generator.urls."
            )
        if launch:
            require_vllm("generator.launch=true")

    _ENGINE_STATE = (*EngineGenerator._ENGINE_STATE, "_process")

    def _forget(self) -> None:
        super()._forget()
        self._process: LaunchedServer | None = None

    @property
    def sends(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True on one rank, which sends for all: they share the servers."""
        return ranks.rank() == 0

    # ------------------------------------------------------------------ servers

    def _start(self, policy: nn.Module) -> Engine:
        urls = self.urls
        if self.launch:
            if len(set(ranks.gather_objects(socket.gethostname()))) > 1:
                raise ConfigError(
                    "generator.launch=true starts a server that its own machine alone can reach, and the run has "
                    "several: start servers with `lit-rl serve` and name them in generator.urls."
                )
            urls = ranks.broadcast_object(ranks.run_on_all_ranks(lambda: self._launch(policy)))
        return ranks.run_on_all_ranks(lambda: self._connect_first(urls))

    def _connect_first(self, urls: Sequence[str]) -> Engine:
        try:
            return self._connect(urls)
        except EngineLost as error:
            if self.launch:
                raise self._failure(str(error)) from error
            raise GenerationError(
                f"{error} Start a server with `lit-rl serve model={self.model.name}`, or set generator.launch=true."
            ) from error

    def _connect(self, urls: Sequence[str], *, after_loss: bool = False) -> Engine:
        assert self._policy is not None
        clients = [Client(url) for url in urls]
        return ServerEngine(
            clients,
            transport_for(self.transport, clients, self.answer_deadline, device_of(self._policy)),
            say=self._print,
            deadline=self.deadline,
            answer_deadline=self.answer_deadline,
            after_loss=after_loss,
        )

    def _launch(self, policy: nn.Module) -> list[str]:
        """Start a server on rank 0, and return the addresses that every rank will use."""
        if ranks.rank() != 0:
            return []
        if self._process is not None:  # left by a failed start
            self._process.stop()
        own = self._process = LaunchedServer(policy, self.model, self.settings_for(policy), self.log)
        with interruptible():
            own.start(self.start_deadline, self._print)
        return [own.url]

    # ------------------------------------------------------------------ one that is lost

    def sync(self, policy: nn.Module, version: int) -> None:
        def synced() -> None:
            self._revise_servers(policy)
            super(VLLMServerGenerator, self).sync(policy, version)

        self._with_recovery(synced, policy)

    def _revise_servers(self, policy: nn.Module) -> None:
        """Drop the servers that a rank has lost, and add those that are there again. A collective.

        Raises:
            EngineLost: none is left.
        """
        engine = self.engine
        if not isinstance(engine, ServerEngine) or len(self.urls) < 2:
            return
        lost = {url for theirs in ranks.gather_objects(engine.lost) for url in theirs}
        held = [client.url for client in engine.clients if client.url not in lost]
        away = [url for url in self.urls if url not in held]
        asks = away and ranks.rank() == 0
        back = ranks.broadcast_object(responsive_servers(away, _LOST_DEADLINE) if asks else [])
        if lost or back:
            answering = [url for url in self.urls if url in held or url in back]
            ranks.run_on_all_ranks(lambda: self._switch_to(answering, policy))

    def _is_current(self) -> bool:
        return self.engine is not None and ranks.run_on_all_ranks(self.engine.facts).version == self._version

    def _run(self, work: EngineWork) -> None:
        if ranks.in_background_thread():
            return self._attempt(work)
        policy, version = self._policy, self._version
        assert policy is not None

        def synced() -> None:
            if self._pushed is None:  # it was lost and is back
                super(VLLMServerGenerator, self).sync(policy, version)
                work.restart()
            self._attempt(work)

        self._with_recovery(synced, policy)

    def _attempt(self, work: EngineWork) -> None:
        assert self.engine is not None
        engine = self.engine

        def check_version() -> None:  # another version means that the answers have other weights
            version = engine.facts().version
            if version != self._version:
                raise EngineLost(
                    f"The servers hold version {version}, not {self._version}: another program updates them."
                )

        super()._run(work)
        ranks.run_on_all_ranks(check_version)

    def _with_recovery(self, work: Any, policy: nn.Module) -> Any:
        """Do `work`; where an engine is lost, bring it back and do it once more. The same on every rank."""
        try:
            return work()
        except EngineLost as lost:
            self._pushed, error = None, lost
            self._sender.forget()
        ranks.run_on_all_ranks(lambda: self._restart_own(error))
        answering = ranks.broadcast_object(ranks.run_on_all_ranks(lambda: self._wait_for_servers(error)))
        ranks.run_on_all_ranks(lambda: self._reconnect(answering, policy))
        try:
            return work()
        except EngineLost as lost:
            raise self._failure(f"The server was lost again, right after it was brought back: {lost}") from lost

    def _restart_own(self, error: EngineLost) -> None:
        """Restart our own server; no rank may look for it before it is gone."""
        self._print(f"{error} Trying once to get it back.")
        if self._process is not None:
            self._print(str(self._failure("It is stopped and started again.")))
            self._process.start(self.start_deadline, self._print)

    def _wait_for_servers(self, lost: EngineLost) -> list[str]:
        """Return, on rank 0, the servers that answer, once one does."""
        engine = self.engine
        if not isinstance(engine, ServerEngine):
            raise lost  # there never was one
        if ranks.rank() != 0:
            return []
        urls = self.urls or [client.url for client in engine.clients]
        try:
            with interruptible():
                return wait_for_servers(urls, self.start_deadline, self.answer_deadline)
        except ServerError as error:
            raise self._failure(
                f"{lost} It did not come back within generator.start_deadline={self.start_deadline:g} seconds: {error}"
            ) from error

    def _reconnect(self, urls: Sequence[str], policy: nn.Module) -> None:
        try:
            self._switch_to(urls, policy)
        except EngineLost as error:
            raise self._failure(str(error)) from error
        if len(urls) >= len(self.urls):
            self._print("It is back.")

    def _switch_to(self, urls: Sequence[str], policy: nn.Module) -> None:
        """Continue with these servers; all weights have to be sent to them."""
        assert self.engine is not None
        self.engine.close()
        self._pushed = None
        self._sender.forget()
        if not urls:
            raise EngineLost("Every server was lost by one rank or another.")
        self.engine = self._connect(urls, after_loss=True)
        self._check_model(self.engine, policy)
        if len(self.urls) > 1:
            away = ", ".join(url for url in self.urls if url not in urls)
            tried = f"; {away} will be tried again at the next update" if away else ""
            self._print(f"Servers that take the weights: {len(urls)} of {len(self.urls)}{tried}.")

    def _failure(self, what: str) -> GenerationError:
        """Return an error with the last lines of the server's log, where it is ours."""
        if self._process is not None:
            return self._process.failure(what)
        return GenerationError(f"{what} Its log is where it was started.")

    def _print(self, line: str) -> None:
        if ranks.rank() == 0:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def close(self) -> None:
        process, self._process = self._process, None  # a thread that still draws finds none that it could start again
        if process is not None:
            process.stop()
        super().close()
