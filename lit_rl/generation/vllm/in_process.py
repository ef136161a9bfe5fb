"""vLLM in this process, beside the policy: `generator=vllm`.

`InProcessEngine` is vLLM's `LLM` under the verbs of `Engine`. Global state that vLLM changes is restored.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lit_rl.core import ranks
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.interrupts import interruptible, uninterruptible
from lit_rl.core.machine import require_vllm
from lit_rl.generation.vllm import engine_settings as vllm_settings
from lit_rl.generation.vllm.engine import (
    CompletionWork,
    Engine,
    EngineAnswer,
    EngineWork,
    Facts,
    Heartbeat,
    Request,
    Shapes,
    check_prompt_tokens,
)
from lit_rl.generation.vllm.engine_generator import EngineGenerator
from lit_rl.generation.vllm.engine_settings import EngineSettings, write_model_files
from lit_rl.models.sharding import device_of


@checked("generator")
class VLLMGenerator(EngineGenerator):
    """vLLM in this process, an engine on every rank.

    The engine is built at the first `sync`, after the strategy was set up: building it is a collective. It loads no
    weights from the disk; the policy's are sent.

    Args:
        sleep: Give the engine's memory back to the training between rollouts: "auto" does so on a GPU (a CPU's is not
            freed by it), or "always" or "never".
        shared: Arguments of `EngineGenerator`.

    Raises:
        ConfigError: a setting out of range.
        BackendError: vLLM is not installed.
    """

    def __init__(self, *, sleep: Literal["auto", "always", "never"] = "auto", **shared: Any) -> None:
        super().__init__(**shared)
        self.sleep = sleep
        require_vllm("generator=vllm")
        if sleep == "always" and vllm_settings.runs_on_cpu():
            rank_zero_warn("generator.sleep=always: vLLM on a CPU ignores it, and frees no memory.")

    _ENGINE_STATE = (*EngineGenerator._ENGINE_STATE, "_asleep")

    def _forget(self) -> None:
        super()._forget()
        self._asleep = False

    def _start(self, policy: nn.Module) -> Engine:
        settings = self.settings_for(policy)
        if ranks.world_size() % settings.tensor_parallel_size:
            raise ConfigError(
                f"generator.tensor_parallel_size={settings.tensor_parallel_size} does not divide the "
                f"{ranks.world_size()} ranks of the run, which share engines: take a divisor, or generator=vllm_server."
            )
        sleeps = self.sleep == "always" or (self.sleep == "auto" and not vllm_settings.runs_on_cpu())
        self.sleeps = sleeps
        with tempfile.TemporaryDirectory(prefix="lit_rl_model_") as folder:
            write_model_files(policy, self.model, folder)
            options = {"sleeps": sleeps, "trust_remote_code": self.model.trust_remote_code}
            return InProcessEngine(folder, settings, device=device_of(policy), **options)

    def check_converses(self) -> None:
        self.check_asked_alone()

    def check_asked_alone(self) -> None:
        size = self.settings.tensor_parallel_size
        if size > 1:
            raise ConfigError(
                f"generator=vllm with generator.tensor_parallel_size={size} does not go with env=: ranks that share an "
                "engine go through the same requests in step. Take generator=vllm_server, or an engine a rank."
            )

    def _run(self, work: EngineWork) -> None:
        """Do the work; ranks that share an engine send it the prompts of all of them, and keep their own answers."""
        size = self.settings.tensor_parallel_size
        if size == 1:
            return super()._run(work)
        first = ranks.rank() // size * size
        own = [request for _, request in work.requests(wait=False)]
        of_group = ranks.gather_objects(own)[first : first + size]
        whole = CompletionWork([request for requests in of_group for request in requests])
        super()._run(whole)
        start = sum(map(len, of_group[: ranks.rank() - first]))
        for number, answers in enumerate(whole.answers[start : start + len(own)]):
            work.done(number, answers)

    # ------------------------------------------------------------------ sleep

    @property
    def share_of_device(self) -> float:
        if vllm_settings.runs_on_cpu() or self.sleep != "never":
            return 0.0
        return self.settings.gpu_memory_utilization

    def sync(self, policy: nn.Module, version: int) -> None:
        if self._asleep and self.engine is not None:
            engine = self.engine
            ranks.run_on_all_ranks(lambda: engine.wake("weights"))
            self._pushed = None  # nothing of them was kept
            self._sender.forget()
        super().sync(policy, version)

    def _push(self, policy: nn.Module, version: int) -> None:
        super()._push(policy, version)
        if self._asleep and self.engine is not None:
            engine = self.engine
            ranks.run_on_all_ranks(lambda: engine.wake("kv_cache"))
            self._asleep = False

    def rest(self) -> None:
        """Give the engine's memory to the training until the next sync."""
        if self.engine is not None and self.sleeps and not self._asleep:
            self.engine.sleep()
            self._asleep = True


# ------------------------------------------------------------------ the engine

ADAPTER = "policy"
"""The one adapter that an engine runs, under this name."""

_running: set[InProcessEngine] = set()

_closed: list[Any] = []
"""Engines of this process that are in use, and vLLM's parts of those that were closed. They share groups of processes
that vLLM takes down with any of them, so all are shut down with the last.
"""


class InProcessEngine:
    """vLLM's `LLM` under the verbs of `Engine`.

    Args:
        folder: Config and tokenizer of the policy.
        settings: Settings of the engine.
        device: The policy's, whose GPU the engine shares.
        sleeps: Let the engine release its memory while the policy learns.
        trust_remote_code: The policy's setting.
    """

    def __init__(
        self, folder: str, settings: EngineSettings, *, device: torch.device, sleeps: bool, trust_remote_code: bool
    ) -> None:
        cpu = vllm_settings.runs_on_cpu()
        arguments = settings.engine_arguments(model_dtype="auto", cpu=cpu)
        # Inside the processes that are there already: on GPUs, each rank's engine takes the rank's own. Of one process
        # vLLM would take the first.
        several = ranks.world_size() > 1 or (device.type == "cuda" and device.index)
        shared = settings.tensor_parallel_size > 1 or bool(several and not cpu)
        # Only a model that is cut over ranks has them meet in every step: engines of one rank each meet while they
        # start, also where they share vLLM's world.
        self._steps_alone = settings.tensor_parallel_size == 1
        if shared:
            arguments["distributed_executor_backend"] = "external_launcher"
        if sleeps and not cpu:
            arguments["enable_sleep_mode"] = True
        with restored_process_state({**vllm_settings.engine_environment(cpu=cpu), **vllm_settings.IN_PROCESS}):
            os.environ.update(launcher_environment(device) if shared else {})
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
        with restored_process_state():
            return self._llm.collective_rpc(method, args=args)[0]

    def facts(self) -> Facts:
        return self._facts

    def pause(self) -> None:
        """Do nothing: nothing runs, as `run` returns when everything is done."""

    def begin(self, shapes: Shapes) -> None:
        self._call("lit_rl_expect", {name: list(shape) for name, shape in shapes.items()})
        self._call("lit_rl_begin")

    def load(self, weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        self._call("lit_rl_load", weights)

    def load_adapter(self, folder: str) -> None:
        with restored_process_state():
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
        with restored_process_state():
            if not self._llm.reset_prefix_cache():
                raise GenerationError("vLLM did not reset its prefix cache: something of it is still in use.")
            self._llm.reset_mm_cache()
            self._llm.llm_engine.reset_encoder_cache()  # what the old weights saw in an image

    def resume(self) -> None:
        """Do nothing; see `pause`."""

    def run(self, work: EngineWork, heartbeat: Heartbeat | None = None) -> None:
        """Do the work; to its end where ranks share an engine: one that left would let the others wait for it."""
        with restored_process_state():
            try:
                with interruptible(alone=self._steps_alone):
                    self._complete(work, heartbeat)
            finally:  # nothing of an interrupted rollout may run in the next one
                engine = self._llm.llm_engine
                if left := list(engine.output_processor.request_states):
                    engine.abort_request(left, internal=True)

    def _complete(self, work: EngineWork, heartbeat: Heartbeat | None) -> None:
        """Send new requests and take finished answers, until nothing is left."""
        from vllm import SamplingParams  # pyright: ignore

        engine, running = self._llm.llm_engine, dict[str, tuple[int, Request]]()
        while True:
            if new := work.requests(wait=not running):
                prompts = [prompt_input(request) for _, request in new]
                with uninterruptible(), _generation_errors():
                    settings = [SamplingParams(**sampling_arguments(request.fields)) for _, request in new]
                    names = self._llm.enqueue(prompts, settings, use_tqdm=False, lora_request=self._adapter)
                # vLLM adds something random to a name, and takes it off again.
                running |= zip([name.partition("-")[0] for name in names], new)
            if not running:
                return
            with uninterruptible(), _generation_errors():  # vLLM takes no step after one that was cut short
                finished = [output for output in engine.step() if output.finished]
            for output in finished:
                number, request = running.pop(output.request_id)
                check_prompt_tokens(request, number, output.prompt_token_ids)
                work.done(number, [read_output(output, one) for one in output.outputs])
            if heartbeat is not None:
                heartbeat(*work.progress)

    def sleep(self) -> None:
        with restored_process_state():
            self._llm.sleep(level=2)

    def wake(self, what: str) -> None:
        with restored_process_state():
            self._llm.wake_up(tags=[what])

    def close(self) -> None:
        """Shut vLLM down, unless the process groups that it would take down are gone: at the end of a process."""
        atexit.unregister(self.close)
        llm, self._llm = self._llm, None
        _running.discard(self)
        if llm is not None:
            _closed.append(llm)
        if not _running and torch.distributed.is_initialized():
            with restored_process_state():
                while _closed:
                    _closed.pop().llm_engine.engine_core.shutdown()


@contextmanager
def _generation_errors() -> Iterator[None]:
    """Raise vLLM's errors as errors of generation."""
    try:
        yield
    except Exception as error:
        raise GenerationError(f"vLLM failed while it generated: {error}") from error


def launcher_environment(device: torch.device) -> dict[str, str]:
    """Return the environment variables for vLLM's external launcher that are missing or wrong in this process.

    vLLM takes ``LOCAL_RANK`` for the index of a GPU among those that the process sees. A launcher counts processes by
    it: of ``trainer.devices=[2,3]`` the second has 1. So it is the index of the GPU that the policy is on; of a policy
    on the CPU the launcher's number, or else Slurm's: a rank counts over all nodes.

    Args:
        device: The policy's.
    """
    rank = str(ranks.rank())
    local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or rank
    world = {"RANK": rank, "WORLD_SIZE": str(ranks.world_size()), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    missing = {name: value for name, value in world.items() if name not in os.environ}
    return missing | {"LOCAL_RANK": str(device.index or 0) if device.type == "cuda" else local}


@contextmanager
def restored_process_state(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Restore the process state that vLLM changes.

    Those are the global random states (it seeds them when it starts, and every sampling call moves torch's), the number
    of threads and `torch.set_num_threads` itself (replaced by a function that only warns), the default type of tensors,
    the current GPU, and environment variables (a preloaded OpenMP, compiler threads, how processes are started).

    Args:
        environment: Variables that vLLM needs, where they are not set already. They stay set: vLLM reads them
            repeatedly.
    """
    for name, value in (environment or {}).items():
        os.environ.setdefault(name, value)
    variables, dtype = dict(os.environ), torch.get_default_dtype()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    python, numpy = random.getstate(), np.random.get_state()
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    quiet = logging.getLogger("torch._library.triton")
    level = quiet.level
    try:
        quiet.setLevel(logging.ERROR)  # that there is no Triton on a CPU is no news
        with torch.random.fork_rng(devices=cuda), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        quiet.setLevel(level)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            set_num_threads(threads)
        torch.set_default_dtype(dtype)
        if device is not None:
            torch.cuda.set_device(device)
        for name in set(os.environ) - set(variables):
            del os.environ[name]
        os.environ.update({name: value for name, value in variables.items() if os.environ.get(name) != value})


# ------------------------------------------------------------------ vLLM's form of requests and answers


def prompt_input(request: Request) -> dict[str, Any]:
    """Return vLLM's form of a prompt.

    Raises:
        DataError: an image is gone, or has changed since the data were read.
    """
    if request.pictured is None:
        return {"prompt_token_ids": request.token_ids}
    images = [image.open() for image in request.pictured.images]
    return {"prompt_token_ids": request.pictured.token_ids, "multi_modal_data": {"image": images}}


def sampling_arguments(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a request's fields as arguments of `SamplingParams`, with the differences from the HTTP body."""
    from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore

    arguments = dict(fields)
    if "logit_bias" in arguments:
        arguments["logit_bias"] = {int(token): bias for token, bias in arguments["logit_bias"].items()}
    if "structured_outputs" in arguments:
        arguments["structured_outputs"] = StructuredOutputsParams(**arguments["structured_outputs"])
    return arguments


def read_output(output: Any, one: Any) -> EngineAnswer:
    ids = list(one.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(one.logprobs, ids, strict=True)]
    prompt = None
    if output.prompt_logprobs is not None:
        entries = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        prompt = [entry[token].logprob for entry, token in entries]
    return EngineAnswer(ids, logprobs, one.finish_reason == "stop", prompt)
