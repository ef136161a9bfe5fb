"""The common base of generators with an engine of their own: weight updates, the proof of each, and the requests."""

from __future__ import annotations

import importlib.util
import inspect
import math
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from lit_rl.errors import ConfigError, GenerationError, LitRLError, in_range, one_of
from lit_rl.generation import ranks
from lit_rl.generation.base import Gap, Generator, check_request, context_length
from lit_rl.generation.engine_kwargs import VLLM
from lit_rl.generation.finished import tell_group
from lit_rl.generation.ranks import together
from lit_rl.generation.vllm.conversing import Conversing
from lit_rl.generation.vllm.engine import Engine, Facts, Weights
from lit_rl.generation.vllm.heartbeat import Beat
from lit_rl.generation.vllm.probe import Probe
from lit_rl.generation.vllm.probe_picture import picture_prompt
from lit_rl.generation.vllm.requests import Answer, check_temperature, completions_of, requests_of
from lit_rl.generation.vllm.sender import PUSHES, Sender, rank_of_adapter, torch_dtype
from lit_rl.generation.vllm.settings import EngineSettings
from lit_rl.generation.vllm.work import Completing, Work
from lit_rl.generation.vllm.worker import shape_of
from lit_rl.models.export.shipping import fingerprint
from lit_rl.models.policy.device import device_of
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.trunk import base_of
from lit_rl.models.policy.vision_parts import placeholder_ids
from lit_rl.rollout import Completions, Prompts, Sampling


def _of_installed(kwargs: Mapping[str, Any]) -> Sequence[str]:
    """Return the settings of the installed vLLM, where a requested one is not in our list."""
    if VLLM.knows(kwargs) or importlib.util.find_spec("vllm") is None:
        return ()
    from vllm import SamplingParams  # pyright: ignore

    return [name for name in inspect.signature(SamplingParams).parameters if not name.startswith("_")]


class EngineGenerator(Generator):
    """Abstract: a generator whose engine holds a copy of the policy.

    `sync` sends the weights, unless the engine has them already, and then proves that they arrived: see `probe`.
    Log-probs of an engine are not the trainer's to the last bit, so the on-policy algorithms correct for it
    (`algo/correction`), and samples are reproducible only as far as the engine's arithmetic is.

    Args:
        dtype: Type of the engine's weights: "float32", "bfloat16" or "float16". None is the policy's own.
        max_model_len: Longest prompt and response together, in tokens. None is what the model was built for.
        gpu_memory_utilization: Share of the GPU's memory that the engine may take, in (0, 1].
        kv_cache_gib: Key-value cache in GiB, in place of `gpu_memory_utilization`. None is 1 GiB on a CPU.
        tensor_parallel_size: GPUs that a copy of the model is cut over. In this process it divides the number of ranks.
        max_num_seqs: Most sequences that run at once; more wait. None is vLLM's choice.
        max_lora_rank: Highest rank of an adapter that is sent by itself. None is the policy's own.
        enforce_eager: Compile nothing and capture no CUDA graphs. None does so on a CPU only.
        push: Content of an update of a LoRA policy: "adapter" sends the adapter alone, "merged" all weights with the
            adapter in them, "auto" the adapter alone where vLLM can run it.
        probe: Comparison of the log-probs of a probe after every update: "every_sync" or "off".
        probe_mean_limit: Largest mean difference of the probe, in nats. None goes by the type.
        probe_max_limit: Largest difference of one token, in nats. None goes by the type.
        heartbeat: Seconds between two lines with the number of finished completions. None prints none.
        generation_kwargs: Further fields of vLLM's `SamplingParams`, such as `presence_penalty`.
    """

    reports_kept_mass = False
    converses = True
    sees = True
    exact = False
    """The engine's log-probs are nearly, not exactly, those of the policy that learns."""

    def __init__(  # noqa: PLR0913 (one keyword a setting)
        self,
        *,
        dtype: Literal["float32", "bfloat16", "float16"] | None = EngineSettings.dtype,
        max_model_len: int | None = EngineSettings.max_model_len,
        gpu_memory_utilization: float = EngineSettings.gpu_memory_utilization,
        kv_cache_gib: float | None = EngineSettings.kv_cache_gib,
        tensor_parallel_size: int = EngineSettings.tensor_parallel_size,
        max_num_seqs: int | None = EngineSettings.max_num_seqs,
        max_lora_rank: int | None = EngineSettings.max_lora_rank,
        enforce_eager: bool | None = EngineSettings.enforce_eager,
        push: Literal["auto", "adapter", "merged"] = "auto",
        probe: Literal["every_sync", "off"] = "every_sync",
        probe_mean_limit: float | None = None,
        probe_max_limit: float | None = None,
        heartbeat: float | None = 30.0,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> None:
        one_of("generator.push", push, PUSHES)
        one_of("generator.probe", probe, ("every_sync", "off"))
        for key, value in (
            ("probe_mean_limit", probe_mean_limit),
            ("probe_max_limit", probe_max_limit),
            ("heartbeat", heartbeat),
        ):
            if value is not None:
                in_range(f"generator.{key}", value, low=0, open_low=True)
        self.settings = EngineSettings(
            dtype=dtype,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_gib=kv_cache_gib,
            tensor_parallel_size=tensor_parallel_size,
            max_num_seqs=max_num_seqs,
            max_lora_rank=max_lora_rank,
            enforce_eager=enforce_eager,
        )
        self.push, self.probe, self.heartbeat = push, probe, heartbeat
        self.generation_kwargs = dict(generation_kwargs or {})
        self.reshaped_by = VLLM.reshaped_by(self.generation_kwargs, also=_of_installed(self.generation_kwargs))
        self._limits = {"mean_limit": probe_mean_limit, "max_limit": probe_max_limit}
        self._model: LanguageModel | None = None
        self._forget()

    def _forget(self) -> None:
        """Reset to the state before any engine and any policy."""
        self.engine: Engine | None = None
        self._policy: nn.Module | None = None
        self._version, self._pushed = 0, None
        self._sender = Sender(self.push)
        self.facts: Facts | None = None
        """The facts of the engine at its start or at the first contact."""
        self._probe: Probe | None = None
        self.gap: Gap | None = None
        """The gap that the probe of the last update found."""
        self.seconds = {"sync": 0.0, "probe": 0.0}
        """Seconds of the last update."""

    _OF_THE_ENGINE = ("engine", "facts", "gap", "seconds", "_policy", "_version", "_pushed", "_sender", "_probe")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without engine and policy: a copy starts its own engine when it is synced."""
        return {name: value for name, value in self.__dict__.items() if name not in self._OF_THE_ENGINE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def prepare(self, model: LanguageModel) -> None:
        """Receive the description of the policy: its tokenizer, and the place of its files."""
        self._model = model
        self._probe = None

    @property
    def model(self) -> LanguageModel:
        if self._model is None:
            raise GenerationError(
                f"{type(self).__name__} was not told which model the policy is: call prepare(model) first, as "
                "GeneratingModule.configure_model does."
            )
        return self._model

    @property
    def _never(self) -> tuple[int, ...]:
        """The tokens that no response may have."""
        return () if self._policy is None else placeholder_ids(base_of(self._policy).config)

    @abstractmethod
    def _start(self, policy: nn.Module) -> Engine:
        """Return an engine for this policy, on every rank; its weights are sent afterwards. A collective."""

    sends = True
    """True where this rank sends the weights to its engine; else another rank sends them to the shared engine."""

    # ------------------------------------------------------------------ sync

    def sync(self, policy: nn.Module, version: int) -> None:
        """Bring the engine to the weights of the policy, and prove it. A collective over all ranks.

        Raises:
            GenerationError: the engine did not take the weights, or its log-probs are not the policy's.
        """
        self._policy = policy
        if self.engine is None:
            engine = together(lambda: self._start(policy))
            try:
                together(lambda: self._check_model(engine, policy))
            except LitRLError:
                engine.close()
                raise
            self.engine = engine
        mark, current = (version, fingerprint(policy)), self._is_current()
        if all(ranks.gather_objects(mark == self._pushed and current)):
            self._version = version
            return
        started = time.perf_counter()
        self._pushed = None
        self._push(policy, version)
        self._version, self._pushed = version, mark
        self.seconds = {**self.seconds, "sync": time.perf_counter() - started}
        if self.probe == "every_sync":
            self._prove(policy, version)

    def _is_current(self) -> bool:
        """Tell whether the engine still holds the last update. May be a collective: every rank asks."""
        return True

    def _push(self, policy: nn.Module, version: int) -> None:
        assert self.engine is not None and self.facts is not None
        weights = Weights(policy, torch_dtype(self.dtype(policy)))
        self._sender(self.engine, self.facts, weights, version, sends=self.sends)

    def _prove(self, policy: nn.Module, version: int) -> None:
        assert self.engine is not None
        started = time.perf_counter()
        if self._probe is None:
            picture = picture_prompt(self.model)
            self._probe = Probe(self.model.tokenizer, picture, never=self._never, **self._limits)
        engine, probe = self.engine, self._probe
        try:
            asked = together(lambda: probe.ask(engine))
            gap = self.gap = probe.compare(asked, policy)  # a collective by itself where the policy is sharded
            together(lambda: probe.judge(asked, gap, version))
        except GenerationError:
            self._pushed = None
            raise
        self.seconds = {**self.seconds, "probe": time.perf_counter() - started}

    def dtype(self, policy: nn.Module) -> str:
        """Return the engine's type: the setting, or the policy's own."""
        return self.settings.dtype or str(next(policy.parameters()).dtype).removeprefix("torch.")

    def settings_for(self, policy: nn.Module) -> EngineSettings:
        """Return the settings with open ones filled from the policy: its type, and the rank of its adapter."""
        rank = None if self.push == "merged" else self.settings.max_lora_rank or rank_of_adapter(policy)
        return replace(self.settings, dtype=self.dtype(policy), max_lora_rank=rank)

    def _check_model(self, engine: Engine, policy: nn.Module) -> None:
        """Keep the engine's facts; refuse an engine of another model than the policy's."""
        facts = self.facts = engine.facts()
        ours: dict[str, Any] = shape_of(base_of(policy).config)
        other = {name: (facts.model.get(name), value) for name, value in ours.items() if facts.model.get(name) != value}
        if other:
            listed = ", ".join(f"{name}: {theirs}, the policy's: {mine}" for name, (theirs, mine) in other.items())
            raise GenerationError(
                f"The engine runs another model than the policy ({listed}). Start it for model={self.model.name}."
            )
        if facts.logprobs_mode != "processed_logprobs":
            raise GenerationError(
                f"The engine reports {facts.logprobs_mode}, not the log-probs of the distribution that it draws from. "
                "Start it by `lit-rl serve`, or with --logprobs-mode processed_logprobs."
            )

    # ------------------------------------------------------------------ generate

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        if self.engine is None or self._policy is None or self._pushed is None:
            raise GenerationError(f"{type(self).__name__}.generate was called before sync: its engine has no policy.")
        device, version = device_of(self._policy), self._version
        work = together(lambda: self._work(prompts, sampling))
        self._run(work)
        if isinstance(work, Conversing):
            return together(lambda: work.completions(device))
        answers = [group * prompts.group_size for group in work.answers] if sampling.greedy else work.answers
        never = self._never
        return together(lambda: completions_of(prompts, answers, version=version, device=device, never=never))

    @property
    def context(self) -> float:
        if self.facts is None or self._policy is None:
            return 0
        return min(self.facts.max_model_len, context_length(self._policy) or math.inf)

    def check(self, sampling: Sampling, longest: int) -> None:
        """Refuse requests that the engine would refuse, as far as that is known before it starts.

        Args:
            sampling: How completions will be drawn; `max_new_tokens` are those of a whole response.
            longest: Tokens of the longest prompt.

        Raises:
            ConfigError: a temperature that vLLM does not take, or lengths above `generator.max_model_len`.
        """
        check_temperature(sampling)
        holds, needed = self.settings.max_model_len, longest + sampling.max_new_tokens
        if holds is not None and needed > holds:
            raise ConfigError(
                f"generator.max_model_len={holds}, and the longest prompt ({longest} tokens) plus the longest response "
                f"({sampling.max_new_tokens}) is {needed}: raise it to {needed}, or shorten them."
            )

    def _work(self, prompts: Prompts, sampling: Sampling) -> Completing | Conversing:
        """Return the engine's work; refuse a request that it cannot do."""
        assert self.facts is not None and self._policy is not None
        check_request(prompts, sampling, self._policy, structured=True)
        holds, longest = self.facts.max_model_len, max(map(len, prompts.token_ids))
        response = prompts.longest_response(sampling)
        if longest + response > holds:
            key = "sampling.max_new_tokens" if prompts.responder is None else "env.max_tokens"
            raise ConfigError(
                f"The longest prompt ({longest} tokens) plus {key}={response} is more than the engine's "
                f"max_model_len={holds}. Set generator.max_model_len to {longest + response}; a server that runs "
                "already has to be started anew with it."
            )
        if prompts.responder is not None:
            check_temperature(sampling)
            return Conversing(prompts, sampling, self._version, self._never, self.generation_kwargs)

        def tell(number: int, answers: list[Answer]) -> None:
            tell_group(prompts.on_finished, number, [answer.token_ids for answer in answers], prompts.group_size)

        requests = requests_of(prompts, sampling, self.generation_kwargs)
        return Completing(requests, None if prompts.on_finished is None else tell)

    def _run(self, work: Work) -> None:
        """Let the engine do the work. A collective."""
        engine = self.engine
        assert engine is not None
        together(lambda: engine.run(work, Beat(self.heartbeat if ranks.rank() == 0 else None)))

    def close(self) -> None:
        """Stop the engine. The next sync starts another one."""
        if self.engine is not None:
            self.engine.close()
        self._forget()
