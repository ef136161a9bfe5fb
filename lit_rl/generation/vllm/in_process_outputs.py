"""The in-process engine's form of requests and answers."""

from __future__ import annotations

from typing import Any

from lit_rl.generation.vllm.requests import Answer, Request


def prompt_of(request: Request) -> dict[str, Any]:
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


def answer_of(output: Any, one: Any) -> Answer:
    ids = list(one.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(one.logprobs, ids, strict=True)]
    prompt = None
    if output.prompt_logprobs is not None:
        entries = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        prompt = [entry[token].logprob for entry, token in entries]
    return Answer(ids, logprobs, one.finish_reason == "stop", prompt)
