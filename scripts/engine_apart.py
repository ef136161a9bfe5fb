"""An engine in a process of its own, for `scripts/kill_loop.py --engine`: what a server is to a run, on one core."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection
from typing import Any

from torch import nn

from lit_rl.core.errors import GenerationError
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.generation.generator import Generator
from lit_rl.generation.native import NativeGenerator


class EngineApart(Generator):
    """Draws in another process, which has nothing but the weights that are sent to it, one after the other.

    Its samples are those of `NativeGenerator`, whose settings it takes. The process ends with the one that started it.
    """

    reports_kept_mass = True

    def __init__(
        self,
        batch_size: int | None = None,
        grouped_cache: bool = True,
        lean_steps: bool = True,
        continuous_batching: bool = True,
    ) -> None:
        self._drawing = NativeGenerator(batch_size, grouped_cache, lean_steps, continuous_batching)
        self._pipe: Connection | None = None
        self._process = 0

    def sync(self, policy: nn.Module, version: int) -> None:
        if self._pipe is None:
            self._pipe, self._process = _started(policy, self._drawing)
        for name, weight in policy.state_dict().items():
            _send(self._pipe, ("weight", name, weight))
        _send(self._pipe, ("synced", version))
        _receive(self._pipe)

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        if self._pipe is None:
            raise GenerationError("EngineApart.generate was called before sync: it holds no policy yet.")
        told = dataclasses.replace(prompts, decode=None, encode=None, on_finished=None)
        _send(self._pipe, ("generate", told, sampling))
        return _receive(self._pipe)

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            os.waitpid(self._process, 0)
        self._pipe = None


def _started(policy: nn.Module, generator: NativeGenerator) -> tuple[Connection, int]:
    ours, its = multiprocessing.Pipe()
    process = os.fork()
    if process == 0:
        ours.close()
        try:
            _engine(its, policy, generator)
        finally:
            os._exit(0)
    its.close()
    return ours, process


def _engine(pipe: Connection, policy: nn.Module, generator: NativeGenerator) -> None:
    """Until nobody is at the other end. The policy is this process's own, since it was forked."""
    weights = dict(policy.state_dict())
    try:
        while True:
            what, *given = _receive(pipe)
            if what == "weight":
                weights[given[0]].copy_(given[1])
            elif what == "synced":
                generator.sync(policy, given[0])
                _send(pipe, None)
            else:
                _send(pipe, generator.generate(*given))
    except (EOFError, OSError):
        return


def _send(pipe: Connection, what: Any) -> None:
    pipe.send_bytes(pickle.dumps(what))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())
