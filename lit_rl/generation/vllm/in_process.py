"""vLLM in this process, beside the policy: `generator=vllm`."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_rl.errors import GenerationError, one_of
from lit_rl.generation import ranks
from lit_rl.generation.vllm import settings as vllm_settings
from lit_rl.generation.vllm.engine import Engine, Facts, Heartbeat, Shapes
from lit_rl.generation.vllm.generator import EngineGenerator
from lit_rl.generation.vllm.host import undisturbed
from lit_rl.generation.vllm.in_process_outputs import answer_of, sampling_arguments
from lit_rl.generation.vllm.model_files import write_model_files
from lit_rl.generation.vllm.requests import Answer, Request
from lit_rl.generation.vllm.settings import EngineSettings

ADAPTER = "policy"
"""The one adapter that an engine runs, under this name."""


class VLLMGenerator(EngineGenerator):
    """vLLM in this process, an engine on every rank.

    The engine is built at the first `sync`, which is after the strategy was set up: building it is a collective. It
    loads no weights from the disk; the policy's are sent.

    Args:
        dtype: Type of the engine's weights: "float32", "bfloat16" or "float16". None is the policy's own.
        max_model_len: Longest prompt and response together, in tokens. None is what the model was built for.
        gpu_memory_utilization: Share of the GPU's memory that the engine may take, in (0, 1].
        kv_cache_gib: Key-value cache in GiB, in place of `gpu_memory_utilization`. None is 1 GiB on a CPU.
        tensor_parallel_size: GPUs that a copy of the model is cut over. In this process it divides the number of ranks.
        max_num_seqs: Most sequences that run at once; more wait. None is vLLM's choice.
        max_lora_rank: Highest rank of an adapter that is sent by itself. None is the policy's own.
        enforce_eager: Compile nothing and capture no CUDA graphs. None does so on a CPU only.
        sleep: Give the engine's memory back to the training between rollouts: "auto" does so on a GPU (a CPU's is not
            freed by it), or "always" or "never".

    Raises:
        ConfigError: a setting out of range.
        BackendError: vLLM is not installed.
    """

    def __init__(  # noqa: PLR0913 (one keyword a setting)
        self,
        *,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.3,
        kv_cache_gib: float | None = None,
        tensor_parallel_size: int = 1,
        max_num_seqs: int | None = None,
        max_lora_rank: int | None = None,
        enforce_eager: bool | None = None,
        sleep: Literal["auto", "always", "never"] = "auto",
        push: Literal["auto", "adapter", "merged"] = "auto",
        probe: Literal["every_sync", "off"] = "every_sync",
        probe_mean_limit: float | None = None,
        probe_max_limit: float | None = None,
        heartbeat: float | None = 30.0,
    ) -> None:
        engine = EngineSettings(
            dtype=dtype,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_gib=kv_cache_gib,
            tensor_parallel_size=tensor_parallel_size,
            max_num_seqs=max_num_seqs,
            max_lora_rank=max_lora_rank,
            enforce_eager=enforce_eager,
        )
        limits = {"probe_mean_limit": probe_mean_limit, "probe_max_limit": probe_max_limit}
        super().__init__(engine, push=push, probe=probe, heartbeat=heartbeat, **limits)
        one_of("generator.sleep", sleep, ("auto", "always", "never"))
        self.sleep = sleep
        self._asleep = False
        vllm_settings.require_vllm("generator=vllm")

    def _start(self, policy: nn.Module) -> Engine:
        settings = self.settings_for(policy)
        sleeps = self.sleep == "always" or (self.sleep == "auto" and not vllm_settings.runs_on_cpu())
        self.sleeps = sleeps
        with tempfile.TemporaryDirectory(prefix="lit_rl_model_") as folder:
            write_model_files(policy, self.model, folder)
            return InProcessEngine(folder, settings, sleeps=sleeps, trust_remote_code=self.model.trust_remote_code)

    # ------------------------------------------------------------------ sleep

    def sync(self, policy: nn.Module, version: int) -> None:
        if self._asleep and self.engine is not None:
            self.engine.wake("weights")
            self._pushed = None  # nothing of them was kept
            self._sender.forget()
        super().sync(policy, version)

    def _push(self, policy: nn.Module, version: int) -> None:
        super()._push(policy, version)
        if self._asleep and self.engine is not None:
            self.engine.wake("kv_cache")
            self._asleep = False

    def rest(self) -> None:
        """Give the engine's memory to the training until the next sync."""
        if self.engine is not None and self.sleeps and not self._asleep:
            self.engine.sleep()
            self._asleep = True


def _launched() -> dict[str, str]:
    """What a launcher would have told this process: vLLM asks for it where ranks share an engine."""
    rank, size = str(ranks.rank()), str(ranks.world_size())
    missing = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return {name: value for name, value in missing.items() if name not in os.environ}


_running: set[InProcessEngine] = set()
_closed: list[Any] = []
"""Engines of this process that are in use, and vLLM's parts of those that were closed. They share groups of processes
that vLLM takes down with any of them, so all are shut down with the last.
"""


class InProcessEngine:
    """vLLM's `LLM` under the verbs of `Engine`."""

    def __init__(self, folder: str, settings: EngineSettings, *, sleeps: bool, trust_remote_code: bool) -> None:
        cpu = vllm_settings.runs_on_cpu()
        arguments = settings.engine_arguments(model_dtype="auto", cpu=cpu)
        if settings.tensor_parallel_size > 1:
            # One engine for several ranks, inside the processes that are there already.
            arguments["distributed_executor_backend"] = "external_launcher"
        if sleeps and not cpu:
            arguments["enable_sleep_mode"] = True
        with undisturbed({**vllm_settings.environment(cpu=cpu), **vllm_settings.IN_PROCESS}):
            os.environ.update(_launched() if settings.tensor_parallel_size > 1 else {})
            from vllm import LLM  # pyright: ignore

            try:
                self._llm: Any = LLM(
                    model=folder,
                    load_format="dummy",
                    seed=0,
                    trust_remote_code=trust_remote_code,
                    **arguments,
                )
            except Exception as error:
                raise GenerationError(f"vLLM did not start: {error}") from error
        self._adapter: Any = None
        self._facts = Facts(**self._call("lit_rl_facts"))
        _running.add(self)
        atexit.register(self.close)

    def _call(self, method: str, *args: Any) -> Any:
        with undisturbed():
            return self._llm.collective_rpc(method, args=args)[0]

    def facts(self) -> Facts:
        return self._facts

    def pause(self) -> None:
        """Nothing runs: `complete` returns when everything is done."""

    def begin(self, shapes: Shapes) -> None:
        self._call("lit_rl_expect", {name: list(shape) for name, shape in shapes.items()})
        self._call("lit_rl_begin")

    def load(self, weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        self._call("lit_rl_load", weights)

    def load_adapter(self, folder: str) -> None:
        with undisturbed():
            from vllm.lora.request import LoRARequest  # pyright: ignore

            self._adapter = LoRARequest(ADAPTER, 1, folder, load_inplace=True)
            self._llm.llm_engine.add_lora(self._adapter)
            self._adapter = LoRARequest(ADAPTER, 1, folder)

    def finish(self, version: int) -> None:
        self._call("lit_rl_finish", version)
        self._facts = replace(self._facts, version=version)

    def stamp(self, version: int) -> None:
        self._call("lit_rl_stamp", version)
        self._facts = replace(self._facts, version=version)

    def reset_caches(self) -> None:
        with undisturbed():
            if not self._llm.reset_prefix_cache():
                raise GenerationError("vLLM did not reset its prefix cache: something of it is still in use.")
            self._llm.reset_mm_cache()

    def resume(self) -> None:
        """See `pause`."""

    def complete(self, requests: Sequence[Request], heartbeat: Heartbeat | None = None) -> list[list[Answer]]:
        with undisturbed():
            from vllm import SamplingParams  # pyright: ignore

            asked = [SamplingParams(**sampling_arguments(request.fields)) for request in requests]
            prompts = [{"prompt_token_ids": request.token_ids} for request in requests]
            try:
                self._llm.enqueue(prompts, asked, use_tqdm=False, lora_request=self._adapter)
                outputs = self._run(sum(request.completions for request in requests), heartbeat)
            except Exception as error:
                raise GenerationError(f"vLLM failed while it generated: {error}") from error
        return [[answer_of(output, one) for one in output.outputs] for output in outputs]

    def _run(self, asked: int, heartbeat: Heartbeat | None) -> list[Any]:
        """Every request to its end; the outputs in the order of the requests."""
        engine, outputs, done = self._llm.llm_engine, [], 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    outputs.append(output)
                    done += len(output.outputs)
            if heartbeat is not None:
                heartbeat(done, asked)
        return sorted(outputs, key=lambda output: int(output.request_id))

    def sleep(self) -> None:
        with undisturbed():
            self._llm.sleep(level=2)

    def wake(self, what: str) -> None:
        with undisturbed():
            self._llm.wake_up(tags=[what])

    def close(self) -> None:
        """Shut vLLM down, unless the process groups that it would take down are gone: at the end of a process."""
        atexit.unregister(self.close)
        llm, self._llm = self._llm, None
        _running.discard(self)
        if llm is not None:
            _closed.append(llm)
        if not _running and torch.distributed.is_initialized():
            with undisturbed():
                while _closed:
                    _closed.pop().llm_engine.engine_core.shutdown()
