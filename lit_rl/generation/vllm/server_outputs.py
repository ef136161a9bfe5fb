"""The HTTP form of requests: for the route of completions, and for the one that takes images too."""

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
    """Return the server's completions of a prompt.

    Args:
        client: The server.
        model: Its name of the policy.
        number: Number of the request.
        request: The request.
        until: The deadline of the answer, by `time.monotonic`.
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
    """Return the body of ``POST /inference/v1/generate``."""
    parts = [{"type": "image_url", "url": _address(image)} for image in pictured.images]
    return {
        "model": model,
        "token_ids": pictured.token_ids,
        "content_parts": parts,
        "sampling_params": fields,
        "return_token_ids": True,
    }


def _address(image: Picture) -> str:
    """Return a ``data:`` URI of the very pixels of the policy: PNG loses none, and the conversion of other modes to RGB
    stays ours."""
    return f"data:image/png;base64,{base64.b64encode(as_png(image.open(), compress_level=1)).decode()}"
