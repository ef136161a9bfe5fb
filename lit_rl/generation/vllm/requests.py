"""Requests to vLLM, made of prompts and settings, and completions, made of its answers.

The fields have the same names in vLLM's `SamplingParams` and in the body of `/v1/completions`, and each is sent, so
that no default of the engine, of the server or of the model's generation config applies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lit_rl.errors import ConfigError, GenerationError, NumericError
from lit_rl.generation.batches import Decoded, assemble
from lit_rl.generation.noise import turn_key
from lit_rl.rollout import Completions, Prompts, Sampling
from lit_rl.videos import VideoRef
from lit_rl.vision import Picture

_TEMPERATURES = 0.01, 2.0
"""vLLM refuses higher ones, and raises lower ones without an error."""

_SEED_BITS = 62
"""vLLM counts a prompt's seed up by one for each further completion, in a signed 64-bit integer."""


@dataclass(frozen=True)
class Pictured:
    """vLLM's form of a prompt with images: it expands the placeholders and makes the pixels itself.

    Expanded placeholders would be expanded again, without an error.
    """

    token_ids: list[int]
    """Tokens with one placeholder an image."""
    images: Sequence[Picture]
    row: int
    """Number of the prompt in its data set; -1: in none."""


@dataclass(frozen=True)
class Request:
    """One prompt, and the settings of its completions."""

    token_ids: list[int]
    """The policy's tokens: placeholders of images expanded."""
    fields: dict[str, Any]
    """Settings by vLLM's names; plain JSON values."""
    pictured: Pictured | None = None
    """The prompt that is sent in place of `token_ids`. None: a prompt without images."""

    @property
    def completions(self) -> int:
        return self.fields["n"]

    @property
    def most_tokens(self) -> int:
        """The tokens of the prompt and all completions at their full length."""
        return len(self.token_ids) + self.completions * self.fields["max_tokens"]


@dataclass(frozen=True)
class Answer:
    """One completion."""

    token_ids: list[int]
    """EOS included, and the token that completed a stop string."""
    logprobs: list[float]
    """Log-probs of the tokens, under the distribution that they were drawn from."""
    ended: bool
    """True where an EOS or a stop string ended it; False where it reached its length."""
    prompt_logprobs: list[float] | None = None
    """Log-softmax of each prompt token but the first, at temperature 1. None where the request did not ask."""


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
        Request(list(ids), fields | {"seed": _seed(key)}, _pictured(prompts, number))
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
    pictured = _pictured(prompts, number)
    if pictured is not None:
        pictured = replace(pictured, token_ids=[*pictured.token_ids, *text])
    fields = _fields(sampling, prompts) | dict(kwargs or {}) | changed
    return Request([*prompts.token_ids[number], *text], fields, pictured)


def _pictured(prompts: Prompts, number: int) -> Pictured | None:
    vision = prompts.vision[number] if prompts.vision else None
    if vision is None:
        return None
    if vision.source is None or prompts.encode is None:
        raise GenerationError(
            f"Prompt {number} of the batch has pixels, and vLLM makes them itself: it takes the images "
            "(PromptVision.source) and a tokenizer for the text around them (Prompts.encode). Data modules and "
            "lit_rl.data.image_prompts.Shown give both."
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
    return Pictured(list(prompts.encode(vision.source.text)), vision.source.visuals, vision.row)


def _seed(key: int) -> int:
    return key & ((1 << _SEED_BITS) - 1)


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
        fields["structured_outputs"] = structured_fields(sampling)
    return fields


def structured_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the constraint on the response's text, by vLLM's names."""
    constraint = sampling.structured
    assert constraint is not None
    if constraint.choice is not None:
        return {"choice": list(constraint.choice)}
    named = {"regex": constraint.regex, "json": constraint.json_schema, "grammar": constraint.grammar}
    return {name: value for name, value in named.items() if value is not None}


def same_prompt(request: Request, number: int, ids: Sequence[int] | None) -> None:
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


def checked(answer: Answer, row: int, version: int, never: Sequence[int] = ()) -> None:
    """Refuse an invalid answer.

    Args:
        answer: The engine's.
        row: Row of the completions.
        version: Version of the engine's weights.
        never: Forbidden tokens: placeholders of images.

    Raises:
        GenerationError: tokens or log-probs are missing, or a token stands for an image that is not there.
        NumericError: a log-prob is NaN.
    """
    if not answer.token_ids or len(answer.token_ids) != len(answer.logprobs):
        raise GenerationError(
            f"Completion {row} of the engine has {len(answer.token_ids)} tokens and {len(answer.logprobs)} "
            "log-probs: it takes one or more, and one for each. A server has to be started by `lit-rl serve`."
        )
    if any(map(math.isnan, answer.logprobs)):
        raise NumericError(
            f"The engine's log-probs of completion {row} hold NaN (policy version {version}): the weights "
            "diverged, or its type is too narrow for this model. Lower optimizer.lr, or set "
            "generator.dtype=bfloat16 or float32."
        )
    if said := set(never).intersection(answer.token_ids):
        raise GenerationError(
            f"Completion {row} of the engine holds the token {min(said)}, which stands for an image: the policy gives "
            "it no probability, and no pass over the completion could be made. lit_rl's workers rule it out: start the "
            "server by `lit-rl serve`, with the trainer's version of lit_rl."
        )


def completions_of(
    prompts: Prompts,
    answers: Sequence[Sequence[Answer]],
    *,
    version: int,
    device: torch.device,
    never: Sequence[int] = (),
) -> Completions:
    """Return answers, one list a prompt, as completions on `device`.

    Raises:
        GenerationError: completions are missing, or one is refused by `checked`, which says what `never` is.
        NumericError: a log-prob is NaN.
    """
    for index, group in enumerate(answers):
        if len(group) != prompts.group_size:
            raise GenerationError(
                f"The engine gave {len(group)} completions of prompt {index}; asked for were {prompts.group_size}."
            )
    rows = [answer for group in answers for answer in group]
    for row, answer in enumerate(rows):
        checked(answer, row, version, never)
    width = max(len(answer.token_ids) for answer in rows)
    lengths = torch.tensor([len(answer.token_ids) for answer in rows])
    ids = torch.tensor([answer.token_ids + [prompts.pad_id] * (width - len(answer.token_ids)) for answer in rows])
    logprobs = torch.tensor([answer.logprobs + [0.0] * (width - len(answer.logprobs)) for answer in rows])
    decoded = Decoded(
        ids=ids.to(device),
        mask=(torch.arange(width) < lengths[:, None]).to(device),
        logprobs=logprobs.float().to(device),
        ended=torch.tensor([answer.ended for answer in rows], device=device),
        kept_logmass=None,
    )
    return assemble(prompts, [(torch.arange(len(rows)), decoded)], version=version, device=device)
