"""Chat completions of OpenAI's API: the request, and a turn of the policy as its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.rollout import Message

MODEL = "policy"
"""The policy's name in the API."""


class RequestRefused(Exception):
    """A refusal that is answered in place of a turn.

    Args:
        why: The reason, for a person.
        status: The HTTP status.
        code: The code of OpenAI's errors, for programs.
    """

    def __init__(self, why: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(why)
        self.status, self.code = status, code

    @property
    def body(self) -> bytes:
        """The refusal as JSON."""
        error = {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()


@dataclass(frozen=True)
class ChatRequest:
    """A request for a turn of the policy."""

    messages: list[Message]
    """With texts as contents; calls as OpenAI writes them, their arguments as JSON text."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_new_tokens: int | None = None
    stream: bool = False


@dataclass(frozen=True)
class ChatTurn:
    """A turn of the policy as an answer."""

    message: Message
    finish: str
    """``stop``, ``tool_calls`` or ``length``."""
    prompt_tokens: int
    new_tokens: int

    @property
    def body(self) -> dict[str, Any]:
        """The turn as a chat completion."""
        choice = {"index": 0, "message": self.message, "finish_reason": self.finish, "logprobs": None}
        return self._around("chat.completion", [choice]) | {"usage": self._usage}

    @property
    def events(self) -> bytes:
        """The turn as the events of a stream: the message, the reason of its end, its length."""
        calls = [{"index": number, **call} for number, call in enumerate(self.message.get("tool_calls") or ())]
        delta = {**self.message, **({"tool_calls": calls} if calls else {})}
        chunks = [
            self._around("chat.completion.chunk", [{"index": 0, "delta": delta, "finish_reason": None}]),
            self._around("chat.completion.chunk", [{"index": 0, "delta": {}, "finish_reason": self.finish}]),
            self._around("chat.completion.chunk", []) | {"usage": self._usage},
        ]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return "".join([*lines, "data: [DONE]\n\n"]).encode()

    def _around(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"id": "chatcmpl-lit-rl", "object": kind, "created": 0, "model": MODEL, "choices": list(choices)}

    @property
    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.new_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.new_tokens, "total_tokens": total}


def read_request(body: bytes) -> ChatRequest:
    """Parse a request. Its sampling settings are ignored: the run's apply.

    Raises:
        RequestRefused: it is no valid request, or asks for a setting that would change a turn.
    """
    try:
        asked = json.loads(body)
    except ValueError as error:
        raise RequestRefused(f"the request is no JSON: {error}") from error
    if not isinstance(asked, dict) or not isinstance(asked.get("messages"), list) or not asked["messages"]:
        raise RequestRefused("the request is an object with a list of messages")
    if not_kept := [name for name, allowed in _KEPT.items() if asked.get(name) not in allowed]:
        raise RequestRefused(f"{', '.join(not_kept)} cannot be asked of a policy in training; leave it out")
    limits = [asked[name] for name in ("max_tokens", "max_completion_tokens") if asked.get(name) is not None]
    if any(not isinstance(limit, int) or limit < 1 for limit in limits):
        raise RequestRefused(f"max_tokens={limits} is no number of tokens")
    return ChatRequest(
        messages=[_message(each) for each in asked["messages"]],
        tools=[_tool(each) for each in _listed("tools", asked.get("tools"))],
        max_new_tokens=min(limits, default=None),
        stream=bool(asked.get("stream")),
    )


_KEPT: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "stop": (None, [], ""),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "tool_choice": (None, "auto"),
}
"""Settings that would change a turn, and the values that do not."""


def _message(given: Any) -> Message:
    if not isinstance(given, dict) or given.get("role") not in ("system", "developer", "user", "assistant", "tool"):
        raise RequestRefused(f"{excerpt(repr(given))} is no message")
    message: Message = {"role": "system" if given["role"] == "developer" else given["role"]}
    message["content"] = _text(given.get("content"))
    if calls := _listed("tool_calls", given.get("tool_calls")):
        message["tool_calls"] = [_checked_call(each) for each in calls]
    if given["role"] == "tool":
        message["tool_call_id"] = str(given.get("tool_call_id") or "")
    return message


def _listed(name: str, given: Any) -> list[Any]:
    if given is not None and not isinstance(given, list):
        raise RequestRefused(f"{name}={excerpt(repr(given))} is no list")
    return given or []


def _checked_call(given: Any) -> Any:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestRefused(f"{excerpt(repr(given))} is no call of a function: that has function.name")
    return given


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise RequestRefused(f"the content {excerpt(repr(content))} is no text, and the policy reads texts")


def _tool(given: Any) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestRefused(f"{excerpt(repr(given))} is no function that can be called")
    described = {"name": function["name"], "description": function.get("description") or ""}
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return {"type": "function", "function": {**described, "parameters": parameters}}
