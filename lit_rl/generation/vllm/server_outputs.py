"""Requests as a server has them: to a route of completions, and to another one that takes images too."""

from __future__ import annotations

import base64
import time
from typing import Any

from lit_rl.generation.vllm.answers import completions_in, drawn_in, prompt_in
from lit_rl.generation.vllm.client import Client
from lit_rl.generation.vllm.requests import Answer, Pictured, Request, same_prompt
from lit_rl.images import as_png
from lit_rl.vision import Picture


def ask_server(
    client: Client, model: str, number: int, request: Request, until: float, vocabulary: int
) -> list[Answer]:
    """The server's completions of a prompt.

    Args:
        client: The server.
        model: What it calls the policy.
        number: Which of the requests it is.
        request: What is asked.
        until: When the answer has to be there, by `time.monotonic`.
        vocabulary: Tokens of the model.

    Raises:
        ServerError: one of its three kinds.
        GenerationError: the engine's tokens of a prompt with images are not the policy's.
        DataError: an image is gone, or has changed since the data were read.
    """
    if request.pictured is None:
        body = {"model": model, "prompt": request.token_ids, **request.fields, "return_token_ids": True}
        return completions_in(client.complete(body, until - time.monotonic()), request, vocabulary)
    body = body_with_images(request.pictured, request.fields, model)
    came = client.generate(body, until - time.monotonic())
    same_prompt(request, number, prompt_in(came))
    return drawn_in(came, request, vocabulary)


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
