"""An API key for every route of a vLLM server: vLLM's own guards completions, and not the routes that replace weights.

`APIKeyMiddleware` is imported by name in the server's process (``--middleware``).
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

API_KEY_VARIABLE = "VLLM_API_KEY"
"""The environment variable of the key, for the server and for the training."""
OPEN_ROUTES = ("/health",)
"""Routes without a key: they tell whether the server is there."""

Scope = MutableMapping[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]


def api_key() -> str:
    """Return the key of the environment; empty where there is none."""
    return os.environ.get(API_KEY_VARIABLE, "").strip()


class APIKeyMiddleware:
    """ASGI middleware (`--middleware` of vLLM's server): 401 for a request without `Authorization: Bearer KEY`.

    Args:
        app: The guarded application.

    Raises:
        RuntimeError: there is no key.
    """

    def __init__(self, app: App) -> None:
        if not api_key():
            raise RuntimeError(f"{API_KEY_VARIABLE} is not set.")
        self._app, self._expected = app, f"Bearer {api_key()}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        free = scope["type"] == "lifespan" or scope["path"] in OPEN_ROUTES
        given = [] if free else [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if free or (len(given) == 1 and hmac.compare_digest(given[0], self._expected)):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = json.dumps({"error": f"Unauthorized: this server asks for the key of {API_KEY_VARIABLE}."}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
