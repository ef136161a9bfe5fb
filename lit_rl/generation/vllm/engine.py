"""The interface of an engine: requests and answers, and the one way in which its weights are replaced.

The fields of a `Request` have the same names in vLLM's `SamplingParams` and in the body of `/v1/completions`. Each is
sent, so that no default of the engine, of the server or of the model's generation config applies. `EngineWork` is a
set of requests that may follow from each other; `Engine.run` does it.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lit_rl.core.errors import ConfigError, GenerationError, LitRLError, NumericError
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.core.transfers import right_pad
from lit_rl.core.vision_inputs import Picture
from lit_rl.core.visuals import VideoRef
from lit_rl.generation.generator import Decoded, EngineLost, assemble
from lit_rl.generation.noise import turn_key
from lit_rl.models.engine_weights import base_weights, weight_shapes, whole_weights


@dataclass(frozen=True)
class Request:
    """One prompt, and the settings of its completions."""

    token_ids: list[int]
    """The policy's tokens: placeholders of images expanded."""
    fields: dict[str, Any]
    """Settings by vLLM's names; plain JSON values."""
    pictured: ImagePrompt | None = None
    """The prompt that is sent in place of `token_ids`. None: a prompt without images."""

    @property
    def completions(self) -> int:
        return self.fields["n"]

    @property
    def most_tokens(self) -> int:
        """The tokens of the prompt and all completions at their full length."""
        return len(self.token_ids) + self.completions * self.fields["max_tokens"]


@dataclass(frozen=True)
class ImagePrompt:
    """vLLM's form of a prompt with images: it expands the placeholders and makes the pixels itself.

    Expanded placeholders would be expanded again, without an error.
    """

    token_ids: list[int]
    """Tokens with one placeholder an image."""
    images: Sequence[Picture]
    row: int
    """Number of the prompt in its data set; -1: in none."""


@dataclass(frozen=True)
class EngineAnswer:
    """One completion."""

    token_ids: list[int]
    """EOS included, and the token that completed a stop string."""
    logprobs: list[float]
    """Log-probs of the tokens, under the distribution that they were drawn from."""
    ended: bool
    """True where an EOS or a stop string ended it; False where it reached its length."""
    prompt_logprobs: list[float] | None = None
    """Log-softmax of each prompt token but the first, at temperature 1. None where the request did not ask."""


# ------------------------------------------------------------------ from prompts to requests

_TEMPERATURES = 0.01, 2.0
"""vLLM refuses higher ones, and raises lower ones without an error."""

_SEED_BITS = 62
"""vLLM counts a prompt's seed up by one for each further completion, in a signed 64-bit integer."""


def requests_of(prompts: Prompts, sampling: Sampling, kwargs: Mapping[str, Any] | None = None) -> list[Request]:
    """Return one request a prompt, for `prompts.group_size` completions each, seeded with the prompt's noise key.

    Args:
        prompts: The requested completions.
        sampling: How to draw.
        kwargs: Further fields, by vLLM's names.

    Raises:
        ConfigError: a temperature that vLLM does not take as it is.
        GenerationError: a prompt has pixels, and its images are not given.
    """
    check_temperature(sampling)
    fields = _fields(sampling, prompts) | dict(kwargs or {})
    return [
        Request(list(ids), fields | {"seed": _seed(key)}, _image_prompt(prompts, number))
        for number, (ids, key) in enumerate(zip(prompts.token_ids, prompts.keys, strict=True))
    ]


def turn_request(
    prompts: Prompts,
    sampling: Sampling,
    row: int,
    turn: int,
    text: Sequence[int],
    room: int,
    kwargs: Mapping[str, Any] | None = None,
) -> Request:
    """Return the request for one turn of one row.

    Args:
        prompts: The requested completions.
        sampling: How to draw.
        row: Row of the completions.
        turn: 0, 1, 2, ... in the row. The first equals that of `requests_of`.
        text: The row's text so far.
        room: Most tokens of the turn.
        kwargs: Further fields, by vLLM's names.
    """
    number, sample = divmod(row, prompts.group_size)
    changed = {
        "n": 1,
        "seed": _seed(turn_key(prompts.keys[number], turn)) + sample,
        "max_tokens": room,
        "min_tokens": min(sampling.min_new_tokens, room),
    }
    pictured = _image_prompt(prompts, number)
    if pictured is not None:
        pictured = replace(pictured, token_ids=[*pictured.token_ids, *text])
    fields = _fields(sampling, prompts) | dict(kwargs or {}) | changed
    return Request([*prompts.token_ids[number], *text], fields, pictured)


def check_temperature(sampling: Sampling) -> None:
    """Refuse temperatures at which vLLM would sample in another way.

    Raises:
        ConfigError: a temperature that vLLM does not take as it is.
    """
    low, high = _TEMPERATURES
    if not sampling.greedy and not low <= sampling.temperature <= high:
        raise ConfigError(
            f"sampling.temperature={sampling.temperature:g} is out of vLLM's range: {low:g} to {high:g}, or 0 for "
            "greedy decoding. Take generator=native for others."
        )


def _fields(sampling: Sampling, prompts: Prompts) -> dict[str, Any]:
    cut = sampling.truncation  # off for greedy decoding
    fields: dict[str, Any] = {
        "n": 1 if sampling.greedy else prompts.group_size,  # vLLM refuses to write one and the same text twice
        "temperature": float(sampling.temperature),
        "top_p": cut.top_p,
        "top_k": cut.top_k,
        "min_p": cut.min_p,
        "repetition_penalty": float(sampling.repetition_penalty),
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        # The engine knows some of the ids that end a response; all are given here, and no other may end it.
        "ignore_eos": True,
        "stop_token_ids": list(prompts.eos_ids),
        "bad_words": list(sampling.bad_words),
        "skip_special_tokens": False,
        "logprobs": 0,
    }
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): float(bias) for token, bias in sampling.logit_bias.items()}
    if sampling.structured is not None:
        form = sampling.structured
        choice = None if form.choice is None else list(form.choice)
        named = {"choice": choice, "regex": form.regex, "json": form.json_schema, "grammar": form.grammar}
        fields["structured_outputs"] = {name: value for name, value in named.items() if value is not None}
    return fields


def _image_prompt(prompts: Prompts, number: int) -> ImagePrompt | None:
    vision = prompts.vision[number] if prompts.vision else None
    if vision is None:
        return None
    if vision.source is None or prompts.encode is None:
        raise GenerationError(
            f"Prompt {number} of the batch has pixels, and vLLM makes them itself: it takes the images "
            "(PromptVision.source) and a tokenizer for the text around them (Prompts.encode). Data modules and "
            "lit_rl.data.visual_prompts.PromptVisuals give both."
        )
    if vision.from_environment:
        raise ConfigError(
            "An environment began an episode with an image, and generator=vllm and vllm_server show images of the data "
            "alone. Take generator=native, or hf."
        )
    if video := next((each for each in vision.source.visuals if isinstance(each, VideoRef)), None):
        raise ConfigError(
            f"Prompt {number} of the batch, row {vision.row} of its data, shows the video {video.name}, and the "
            "generators of vLLM are given images alone. Set generator=native or generator=hf."
        )
    return ImagePrompt(list(prompts.encode(vision.source.text)), vision.source.visuals, vision.row)


def _seed(key: int) -> int:
    return key & ((1 << _SEED_BITS) - 1)


# ------------------------------------------------------------------ from answers to completions


def completions_of(
    prompts: Prompts,
    answers: Sequence[Sequence[EngineAnswer]],
    *,
    version: int,
    device: torch.device,
    forbidden: Sequence[int] = (),
) -> Completions:
    """Return answers, one list a prompt, as completions on `device`.

    Raises:
        GenerationError: completions are missing, or one is refused by `check_answer`, which says what `forbidden` is.
        NumericError: a log-prob is NaN.
    """
    for index, group in enumerate(answers):
        if len(group) != prompts.group_size:
            raise GenerationError(
                f"The engine gave {len(group)} completions of prompt {index}; asked for were {prompts.group_size}."
            )
    rows = [answer for group in answers for answer in group]
    for row, answer in enumerate(rows):
        check_answer(answer, row, version, forbidden)
    ids, mask = right_pad([answer.token_ids for answer in rows], prompts.pad_id)
    logprobs, _ = right_pad([answer.logprobs for answer in rows], 0.0)
    decoded = Decoded(
        ids=ids.to(device),
        mask=mask.to(device),
        logprobs=logprobs.float().to(device),
        ended=torch.tensor([answer.ended for answer in rows], device=device),
        kept_logmass=None,
    )
    return assemble(prompts, [(torch.arange(len(rows)), decoded)], version=version, device=device)


def check_answer(answer: EngineAnswer, row: int, version: int, forbidden: Sequence[int] = ()) -> None:
    """Refuse an invalid answer.

    Args:
        answer: The engine's.
        row: Row of the completions.
        version: Version of the engine's weights.
        forbidden: Forbidden tokens: placeholders of images.

    Raises:
        GenerationError: tokens or log-probs are missing, or a token stands for an image that is not there.
        NumericError: a log-prob is NaN.
    """
    if not answer.token_ids or len(answer.token_ids) != len(answer.logprobs):
        raise GenerationError(
            f"Completion {row} of the engine has {len(answer.token_ids)} tokens and {len(answer.logprobs)} "
            "log-probs, expected one token or more, with one log-prob each. If a server answers, start it with "
            "`lit-rl serve`."
        )
    if any(map(math.isnan, answer.logprobs)):
        raise NumericError(
            f"The engine's log-probs of completion {row} hold NaN (policy version {version}): the weights "
            "diverged, or its type is too narrow for this model. Lower optimizer.lr, or set "
            "generator.dtype=bfloat16 or float32."
        )
    if placeholders := set(forbidden).intersection(answer.token_ids):
        raise GenerationError(
            f"Completion {row} of the engine holds the token {min(placeholders)}, which stands for an image: the "
            "policy gives it no probability, and no pass over the completion could be made. lit_rl's workers rule it "
            "out: start the server by `lit-rl serve`, with the trainer's version of lit_rl."
        )


def check_prompt_tokens(request: Request, number: int, ids: Sequence[int] | None) -> None:
    """Refuse an answer to another prompt with images than the policy will be trained on.

    Args:
        request: The request.
        number: Its number.
        ids: The engine's tokens of the prompt.

    Raises:
        GenerationError: they are not the policy's.
    """
    ours, theirs = request.token_ids, list(ids or ())
    if request.pictured is None or ours == theirs:
        return
    row = f"row {request.pictured.row} of the data" if request.pictured.row >= 0 else "the probe's image"
    first = next((i for i, (mine, its) in enumerate(zip(ours, theirs)) if mine != its), min(len(ours), len(theirs)))
    raise GenerationError(
        f"Prompt {number} of the batch ({row}) has {len(ours)} tokens with its images, and the engine made "
        f"{len(theirs)} of it, which differ from token {first} on. Its processor is not the policy's: start the server "
        "for the same model with the same versions of transformers and torchvision, or take generator=native."
    )


# ------------------------------------------------------------------ work


class EngineWork(ABC):
    """Abstract: requests, and the use of their answers. Used by one thread."""

    max_concurrent: int
    """Most requests at the same time."""

    @abstractmethod
    def requests(self, *, wait: bool) -> list[tuple[int, Request]]:
        """Return the requests that are ready and were not returned yet, each with its number.

        A number comes again once its last request is done: then both texts begin alike.

        Args:
            wait: Wait until there is one or more. Only where no request runs; none then means that all is done.
        """

    @abstractmethod
    def done(self, number: int, answers: list[EngineAnswer]) -> None:
        """Take the answers of the last request with this number."""

    @abstractmethod
    def restart(self) -> None:
        """Begin again: the engine was lost and is back.

        Raises:
            ConversationsLost: others have to do that.
        """

    @property
    @abstractmethod
    def progress(self) -> tuple[int, int]:
        """The numbers of done and of requested completions."""


class CompletionWork(EngineWork):
    """Requests that are known from the beginning.

    Args:
        requests: All of them.
        on_finished: Called with the number of a request and its answers, as they arrive.
    """

    def __init__(
        self, requests: Sequence[Request], on_finished: Callable[[int, list[EngineAnswer]], None] | None = None
    ) -> None:
        self.max_concurrent, self._all, self._on_finished = len(requests), requests, on_finished
        self._asked = sum(request.completions for request in requests)
        self.restart()

    @property
    def answers(self) -> list[list[EngineAnswer]]:
        """The answers to each request, in order, when all is done."""
        return [self._answers[number] for number in range(self.max_concurrent)]

    def requests(self, *, wait: bool) -> list[tuple[int, Request]]:
        new, self._requests = self._requests, []
        return new

    def done(self, number: int, answers: list[EngineAnswer]) -> None:
        self._answers[number] = answers
        if self._on_finished is not None:
            self._on_finished(number, answers)

    def restart(self) -> None:
        self._requests = list(enumerate(self._all))
        self._answers: dict[int, list[EngineAnswer]] = {}

    @property
    def progress(self) -> tuple[int, int]:
        return sum(map(len, self._answers.values())), self._asked


def complete(
    engine: Engine, requests: Sequence[Request], heartbeat: Heartbeat | None = None
) -> list[list[EngineAnswer]]:
    """Return the completions of each request, in order."""
    work = CompletionWork(requests)
    engine.run(work, heartbeat)
    return work.answers


# ------------------------------------------------------------------ the engine and its weights

Shapes = Mapping[str, tuple[int, ...]]
"""Whole shapes by the names of the plain Hugging Face model."""


@dataclass(frozen=True)
class Weights:
    """The weights for an engine, see `lit_rl.models.engine_weights`. Iterating is a collective where it is sharded."""

    policy: nn.Module
    dtype: torch.dtype
    """The engine's."""
    base_only: bool = False
    """Leave adapters out: the engine takes them by themselves."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return (base_weights if self.base_only else whole_weights)(self.policy, self.dtype)

    @property
    def shapes(self) -> Shapes:
        return weight_shapes(self.policy)


Heartbeat = Callable[[int, int], None]
"""A function of the numbers of done and requested completions, called repeatedly while they are made."""


@dataclass(frozen=True)
class Facts:
    """An engine's facts about itself: see `worker.WeightUpdates.lit_rl_facts`."""

    instance: str
    """A new value after every start."""
    version: int | None
    """The version of the last finished update; None before it."""
    model: dict[str, Any]
    """Architecture and sizes."""
    dtype: str
    max_model_len: int
    block_size: int
    """Tokens of a block of the key-value cache; a prefix is kept in whole blocks."""
    logprobs_mode: str
    max_num_seqs: int
    """Sequences that run at once; more wait."""
    max_lora_rank: int | None
    device: str

    @property
    def vocabulary(self) -> int:
        """The number of tokens of the model; ids are below it."""
        return self.model["vocab_size"]


class Engine(Protocol):
    """The interface of vLLM, here or elsewhere. `push_weights` and `push_adapter` alone call the verbs of an update."""

    def facts(self) -> Facts: ...

    def pause(self) -> None:
        """Accept no more requests, and wait for those that run."""
        ...

    def begin(self, shapes: Shapes) -> None:
        """Open an update of all weights; refuse names and shapes that are not this model's."""
        ...

    def load(self, weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> None: ...

    def load_adapter(self, folder: str) -> None:
        """Replace the adapter; every later request runs with the new one."""
        ...

    def finish(self, version: int) -> None: ...

    def stamp(self, version: int) -> None:
        """Set the version of the weights, where an adapter alone was renewed."""
        ...

    def reset_caches(self) -> None:
        """Empty the caches with results of the old weights."""
        ...

    def resume(self) -> None: ...

    def run(self, work: EngineWork, heartbeat: Heartbeat | None = None) -> None:
        """Answer requests as they come, many at a time, until all are done. See `complete`."""
        ...

    def sleep(self) -> None:
        """Release the memory of weights and cache. They are lost: an update has to follow."""
        ...

    def wake(self, what: str) -> None:
        """Allocate memory again: `weights` before an update, `kv_cache` after it."""
        ...

    def close(self) -> None: ...


def push_weights(engine: Engine, weights: Weights, version: int) -> None:
    """Replace all weights of an engine: pause, update, finish, reset every cache, resume.

    To iterate `weights` may be a collective over ranks, so they are iterated to their end also where the engine fails:
    the other ranks would wait forever.

    Raises:
        GenerationError: the engine refused a weight, missed one, or failed. It then has no usable weights.
    """
    rest, begun = iter(weights), False
    try:
        engine.pause()
        engine.begin(weights.shapes)
        begun = True
        engine.load(rest, weights.dtype)
        engine.finish(version)
        engine.reset_caches()
        engine.resume()
    except Exception as error:
        for _ in rest:
            pass
        if not begun and not isinstance(error, EngineLost):  # it has its old weights, and others may use it
            with contextlib.suppress(GenerationError):
                engine.resume()
        if isinstance(error, LitRLError):
            raise
        raise GenerationError(f"The engine did not take over policy version {version}: {error}") from error


def push_adapter(engine: Engine, folder: str, version: int) -> None:
    """Replace the adapter of an engine whose base stays: the same order as `push_weights`.

    Raises:
        GenerationError: the engine refused the adapter, or failed.
    """
    try:
        engine.pause()
        engine.load_adapter(folder)
        engine.stamp(version)
        engine.reset_caches()
        engine.resume()
    except LitRLError:
        raise
    except Exception as error:
        raise GenerationError(f"The engine did not take over the adapter of version {version}: {error}") from error
