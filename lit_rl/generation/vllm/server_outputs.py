"""Requests and answers as a server has them: a route of completions, and another one that takes images too."""

from __future__ import annotations

import base64
import math
import time
from typing import Any

from lit_rl.generation.vllm.client import Client
from lit_rl.generation.vllm.requests import Answer, Pictured, Request, same_prompt
from lit_rl.images import as_png
from lit_rl.vision import Picture

_NO_NUMBER = -9999.0
"""What the route that takes images says in the place of NaN: no token that was drawn has so low a log-prob."""


def ask_server(client: Client, model: str, number: int, request: Request, until: float) -> list[Answer]:
    """The server's completions of a prompt.

    Args:
        client: The server.
        model: What it calls the policy.
        number: Which of the requests it is.
        request: What is asked.
        until: When the answer has to be there, by `time.monotonic`.

    Raises:
        ServerError: one of its three kinds.
        GenerationError: the engine's tokens of a prompt with images are not the policy's.
        DataError: an image is gone, or has changed since the data were read.
    """
    if request.pictured is None:
        body = {"model": model, "prompt": request.token_ids, **request.fields, "return_token_ids": True}
        return _completions(client.complete(body, until - time.monotonic()), request)
    body = body_with_images(request.pictured, request.fields, model)
    answer = client.generate(body, until - time.monotonic())
    same_prompt(request, number, answer.get("prompt_token_ids"))
    return [_drawn(choice) for choice in _in_order(answer)]


def body_with_images(pictured: Pictured, fields: dict[str, Any], model: str) -> dict[str, Any]:
    """Of ``POST /inference/v1/generate``."""
    parts = [{"type": "image_url", "url": _address(image)} for image in pictured.images]
    return {
        "model": model,
        "token_ids": pictured.token_ids,
        "content_parts": parts,
        "sampling_params": fields,
        "return_token_ids": True,
    }


def _address(image: Picture) -> str:
    """A ``data:`` URI of the very pixels that the policy sees: PNG loses none, and how an image of another mode becomes
    RGB is for us to say."""
    return f"data:image/png;base64,{base64.b64encode(as_png(image.open(), compress_level=1)).decode()}"


def _in_order(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(answer["choices"], key=lambda choice: choice["index"])


def _drawn(choice: dict[str, Any]) -> Answer:
    found = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
    logprobs = [math.nan if value <= _NO_NUMBER else value for value in found]
    return Answer(choice.get("token_ids") or [], logprobs, choice["finish_reason"] == "stop")


def _completions(answer: dict[str, Any], request: Request) -> list[Answer]:
    found = []
    for choice in _in_order(answer):
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        prompt = choice.get("prompt_logprobs")
        scored = None
        if prompt is not None:
            pairs = zip(prompt[1:], request.token_ids[1:], strict=True)
            scored = [entry[str(token)]["logprob"] for entry, token in pairs]
        found.append(Answer(choice.get("token_ids") or [], logprobs, choice["finish_reason"] == "stop", scored))
    return found
