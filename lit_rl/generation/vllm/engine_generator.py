"""The common base of generators with an engine of their own: weight updates, the proof of each, and requests.

Conversations are a request for each row and turn, in which no row waits for another.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from lit_rl.core import ranks
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, GenerationError, LitRLError
from lit_rl.core.ranks import run_on_all_ranks
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.generation.engine_kwargs import VLLM_NAMES
from lit_rl.generation.generator import (
    ConversationsLost,
    Decoded,
    Gap,
    Generator,
    assemble,
    check_request,
    context_length,
)
from lit_rl.generation.responses import Responses
from lit_rl.generation.vllm.engine import (
    CompletionWork,
    Engine,
    EngineAnswer,
    EngineWork,
    Facts,
    Request,
    Weights,
    check_answer,
    check_temperature,
    completions_of,
    requests_of,
    turn_request,
)
from lit_rl.generation.vllm.engine_settings import EngineSettings, LoraRank
from lit_rl.generation.vllm.transports import WeightSender, rank_of_adapter
from lit_rl.generation.vllm.weight_probe import WeightProbe, image_probe
from lit_rl.generation.vllm.worker import shape_of
from lit_rl.models.engine_weights import fingerprint
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.sharding import device_of
from lit_rl.models.trunk import base_of
from lit_rl.models.vision_parts import placeholder_ids
from lit_rl.ops.ranges import AtLeastOne, AtLeastTwo, Positive, Share


@checked("generator")
class EngineGenerator(Generator):
    """Abstract: a generator whose engine holds a copy of the policy.

    `sync` sends the weights, unless the engine has them already, and then proves that they arrived: see `weight_probe`.
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
        max_model_len: AtLeastTwo | None = EngineSettings.max_model_len,
        gpu_memory_utilization: Share = EngineSettings.gpu_memory_utilization,
        kv_cache_gib: Positive | None = EngineSettings.kv_cache_gib,
        tensor_parallel_size: AtLeastOne = EngineSettings.tensor_parallel_size,
        max_num_seqs: AtLeastOne | None = EngineSettings.max_num_seqs,
        max_lora_rank: LoraRank | None = EngineSettings.max_lora_rank,
        enforce_eager: bool | None = EngineSettings.enforce_eager,
        push: Literal["auto", "adapter", "merged"] = "auto",
        probe: Literal["every_sync", "off"] = "every_sync",
        probe_mean_limit: Positive | None = None,
        probe_max_limit: Positive | None = None,
        heartbeat: Positive | None = 30.0,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> None:
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
        self.reshaped_by = VLLM_NAMES.reshaped_by(
            self.generation_kwargs, also=_installed_settings(self.generation_kwargs)
        )
        self._limits = {"mean_limit": probe_mean_limit, "max_limit": probe_max_limit}
        self._model: LanguageModel | None = None
        self._forget()

    def _forget(self) -> None:
        """Reset to the state before any engine and any policy."""
        self.engine: Engine | None = None
        self._policy: nn.Module | None = None
        self._version, self._pushed = 0, None
        self._sender = WeightSender(self.push)
        self.facts: Facts | None = None
        """The facts of the engine at its start or at the first contact."""
        self._probe: WeightProbe | None = None
        self.gap: Gap | None = None
        """The gap that the probe of the last update found."""
        self.seconds = {"sync": 0.0, "probe": 0.0}
        """Seconds of the last update."""

    _ENGINE_STATE = ("engine", "facts", "gap", "seconds", "_policy", "_version", "_pushed", "_sender", "_probe")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without engine and policy: a copy starts its own engine when it is synced."""
        return {name: value for name, value in self.__dict__.items() if name not in self._ENGINE_STATE}

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
                f"{type(self).__name__} does not know the policy's model yet: call prepare(model) first, as "
                "GeneratingModule.configure_model does."
            )
        return self._model

    @property
    def _forbidden(self) -> tuple[int, ...]:
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
            engine = run_on_all_ranks(lambda: self._start(policy))
            try:
                run_on_all_ranks(lambda: self._check_model(engine, policy))
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
        weights = Weights(policy, getattr(torch, self.dtype(policy)))
        self._sender(self.engine, self.facts, weights, version, sends=self.sends)

    def _prove(self, policy: nn.Module, version: int) -> None:
        assert self.engine is not None
        started = time.perf_counter()
        if self._probe is None:
            picture = image_probe(self.model)
            self._probe = WeightProbe(self.model.tokenizer, picture, forbidden=self._forbidden, **self._limits)
        engine, probe = self.engine, self._probe
        try:
            asked = run_on_all_ranks(lambda: probe.ask(engine))
            gap = self.gap = probe.compare(asked, policy)  # a collective by itself where the policy is sharded
            run_on_all_ranks(lambda: probe.judge(asked, gap, version))
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
        work = run_on_all_ranks(lambda: self._work(prompts, sampling))
        self._run(work)
        if isinstance(work, ConversationWork):
            return run_on_all_ranks(lambda: work.completions(device))
        answers = [group * prompts.group_size for group in work.answers] if sampling.greedy else work.answers
        forbidden = self._forbidden
        return run_on_all_ranks(
            lambda: completions_of(prompts, answers, version=version, device=device, forbidden=forbidden)
        )

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

    def _work(self, prompts: Prompts, sampling: Sampling) -> CompletionWork | ConversationWork:
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
            return ConversationWork(prompts, sampling, self._version, self._forbidden, self.generation_kwargs)

        on_finished, size = prompts.on_finished, prompts.group_size

        def report(number: int, answers: list[EngineAnswer]) -> None:
            assert on_finished is not None
            for sample in range(size):  # a greedy answer stands for the whole group
                on_finished(number * size + sample, answers[sample % len(answers)].token_ids)

        requests = requests_of(prompts, sampling, self.generation_kwargs)
        return CompletionWork(requests, None if on_finished is None else report)

    def _run(self, work: EngineWork) -> None:
        """Let the engine do the work. A collective."""
        engine = self.engine
        assert engine is not None
        run_on_all_ranks(lambda: engine.run(work, ProgressLine(self.heartbeat if ranks.rank() == 0 else None)))

    def close(self) -> None:
        """Stop the engine. The next sync starts another one."""
        if self.engine is not None:
            self.engine.close()
        self._forget()


def _installed_settings(kwargs: Mapping[str, Any]) -> Sequence[str]:
    """Return the settings of the installed vLLM, where a requested one is not in our list."""
    if VLLM_NAMES.knows(kwargs) or importlib.util.find_spec("vllm") is None:
        return ()
    from vllm import SamplingParams  # pyright: ignore

    return [name for name in inspect.signature(SamplingParams).parameters if not name.startswith("_")]


class ProgressLine:
    """A printer of the number of finished completions, at most once in `every` seconds; None prints nothing."""

    def __init__(self, every: float | None) -> None:
        self._every, self._last = every, time.monotonic()

    def __call__(self, done: int, asked: int) -> None:
        now = time.monotonic()
        if self._every is not None and now - self._last >= self._every:
            self._last = now
            sys.stdout.write(f"generating: {done} of {asked} completions\n")
            sys.stdout.flush()


class ConversationWork(EngineWork):
    """The conversations of all rows of a request, numbered as the completions are.

    The first turns equal those without a responder. The seed of a later one is made of the prompt's key, the turn and
    the sample, and so depends on no other row. A row's earlier text is in the engine's prefix cache, except for the
    last block.

    Args:
        prompts: The requested completions; their responder answers.
        sampling: How to draw; ``max_new_tokens`` are those of a turn.
        version: The version of the engine's weights.
        forbidden: Forbidden tokens.
        kwargs: Further fields of every request, by vLLM's names.
    """

    def __init__(
        self,
        prompts: Prompts,
        sampling: Sampling,
        version: int,
        forbidden: Sequence[int] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.max_concurrent = len(prompts) * prompts.group_size
        self._prompts, self._sampling, self._version, self._forbidden = prompts, sampling, version, forbidden
        self._kwargs = kwargs
        self._responses = Responses(prompts, sampling, self.max_concurrent, torch.device("cpu"))
        self._requests = [(row, self._request(row)) for row in range(self.max_concurrent)]
        self._open = self.max_concurrent

    def requests(self, *, wait: bool) -> list[tuple[int, Request]]:
        responder = self._prompts.responder
        assert responder is not None
        new, self._requests = self._requests, []
        while self._open and not new:
            answers = responder.answers(wait=wait)
            for each in answers:
                if each.seen:  # an engine is asked with tokens
                    raise ConfigError(
                        "A tool or an environment returned an image, and generator=vllm and vllm_server show images of "
                        "prompts alone. Take generator=native, or hf."
                    )
                if self._responses.add_answer(each):
                    new.append((each.row, self._request(each.row)))
                else:
                    self._open -= 1
            if not wait:
                break
        return new

    def done(self, number: int, answers: list[EngineAnswer]) -> None:
        responder, (answer,) = self._prompts.responder, answers
        assert responder is not None
        check_answer(answer, number, self._version, self._forbidden)
        self._responses.add_turn(number, answer.token_ids, answer.logprobs, ended=answer.ended)
        (turn,) = self._responses.newest_turns([number])
        responder.tell(turn)

    def restart(self) -> None:
        raise ConversationsLost(
            f"The engine was lost in the middle of {self.max_concurrent} conversations, and is back."
        )

    @property
    def progress(self) -> tuple[int, int]:
        return self.max_concurrent - self._open, self.max_concurrent

    def completions(self, device: torch.device) -> Completions:
        """Return the finished conversations on this device."""
        decoded = replace(self._responses.decoded(), kept_logmass=None)  # the engine does not report it
        moved: dict[str, Any] = {
            name: None if part is None else part.to(device) for name, part in vars(decoded).items()
        }
        rows = torch.arange(self.max_concurrent)
        return assemble(self._prompts, [(rows, Decoded(**moved))], version=self._version, device=device)

    def _request(self, row: int) -> Request:
        """Return the next turn of a row, with its text so far and the room for it."""
        turn, (text,), room = self._responses.turn(row), self._responses.texts([row]), self._responses.tokens_left(row)
        return turn_request(self._prompts, self._sampling, row, turn, text, room, self._kwargs)
