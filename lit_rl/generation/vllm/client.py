"""The routes of vLLM's server, one method each; every call has a deadline in seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lit_rl.generation.vllm import answers
from lit_rl.generation.vllm.answers import Answered
from lit_rl.generation.vllm.calls import JSONCalls, ServerDead, ServerRefused
from lit_rl.generation.vllm.engine import Facts

_AGAIN = 0.05


class Client(JSONCalls):
    """A client of one server with vLLM's routes of training, started by `lit-rl serve`, by `launch` or otherwise.

    Every method raises `calls.ServerDead`, `ServerHung` or `ServerRefused`; answers are checked in `answers`.
    """

    def health(self, deadline: float) -> None:
        """Return if the engine behind the server lives.

        Raises:
            ServerDead: also where the server answers and its engine does not live.
        """
        try:
            self.get("/health", deadline)
        except ServerRefused as error:
            if error.status == 503:
                raise ServerDead(self.url, "GET /health", "its engine has died.") from error
            raise

    def models(self, deadline: float) -> dict[str, int | None]:
        """Return the names of the model and of adapters, each with its longest sequence in tokens."""
        return answers.names_in(self._answered("GET /v1/models", self.get("/v1/models", deadline)))

    def world_size(self, deadline: float) -> int:
        """Return the number of workers behind the server, of all copies of the model together."""
        return answers.workers_in(self._answered("GET /get_world_size", self.get("/get_world_size", deadline)))

    def facts(self, deadline: float) -> Facts:
        """Return the engine's facts from its first worker; all workers of a server are alike."""
        first, *_ = self.rpc("lit_rl_facts", deadline=deadline)
        return answers.facts_in(self._answered("rpc lit_rl_facts", first))

    def rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, deadline: float
    ) -> list[Any]:
        """Call a method of every worker, and return the results, one a worker.

        Arguments and results are JSON values; a result that is no dict, list or None comes as a string.
        """
        body = {"method": method, "args": list(args), "kwargs": dict(kwargs or {}), "timeout": deadline}
        return answers.results_in(self._answered(f"rpc {method}", self.post("/collective_rpc", deadline, body)))

    def complete(self, payload: Mapping[str, Any], deadline: float) -> Answered:
        """Return the answer of ``POST /v1/completions``, for `answers.completions_in`."""
        return self._answered("POST /v1/completions", self.post("/v1/completions", deadline, payload))

    def generate(self, payload: Mapping[str, Any], deadline: float) -> Answered:
        """Return the answer of ``POST /inference/v1/generate``, which takes images beside token ids, for
        `answers.drawn_in`. A server started with ``--enable-scale-out`` has this route."""
        route = "/inference/v1/generate"
        return self._answered(f"POST {route}", self.post(route, deadline, payload))

    def pause(self, deadline: float, mode: Literal["abort", "wait", "keep"] = "wait") -> None:
        """Accept no new requests. Running ones are aborted, waited for, or frozen until `resume`."""
        self.post("/pause", deadline, mode=mode)

    def resume(self, deadline: float) -> None:
        """Accept requests again after `pause`."""
        self.post("/resume", deadline)

    def reset_caches(self, deadline: float) -> None:
        """Empty every cache with results of older weights: of prefixes, of images, of encoders.

        Raises:
            ServerRefused: requests still hold parts of the prefix cache when the deadline comes.
        """
        call, until = "POST /reset_prefix_cache", time.monotonic() + deadline
        while not answers.was_reset(self._answered(call, self.post("/reset_prefix_cache", _left(until)))):
            if _left(until) < 2 * _AGAIN:
                raise ServerRefused(self.url, call, "running requests hold the prefix cache: pause first.", 200)
            time.sleep(_AGAIN)
        self.post("/reset_mm_cache", _left(until))
        self.post("/reset_encoder_cache", _left(until))

    def load_adapter(self, name: str, path: str, deadline: float) -> None:
        """Load a PEFT adapter from a folder that the server can read, in place of one of the same name.

        Requests with ``"model": name`` then use it. The caches stay as they are.
        """
        self.post("/v1/load_lora_adapter", deadline, {"lora_name": name, "lora_path": path, "load_inplace": True})

    def _answered(self, call: str, value: Any) -> Answered:
        return Answered(self.url, call, value)


def _left(until: float) -> float:
    return until - time.monotonic()
