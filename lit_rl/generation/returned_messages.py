"""The messages of a completion of a rollout function: one for each turn of the policy and each answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.rollout import Message

_ROLES = ("assistant", "tool", "user", "system")


class NoMessages(ValueError):
    """Returned messages that are invalid, and the reason."""


def decoded_messages(token_ids: Sequence[int], written: Sequence[bool], tokenizer: Any) -> list[Message]:
    """Return each stretch of tokens by one author as a message. Tokens do not name the author of answers: it is the
    user.

    Args:
        token_ids: The completion's tokens.
        written: True for those that the policy wrote.
        tokenizer: The policy's.
    """
    return [
        {
            "role": "assistant" if by_policy else "user",
            "content": str(tokenizer.decode([token for _, token in part], skip_special_tokens=True)),
        }
        for by_policy, part in groupby(zip(written, token_ids, strict=True), key=lambda each: each[0])
    ]


def read_messages(given: Any, turns: int) -> list[Message]:
    """Return the messages of a rollout function, with the arguments of calls as mappings.

    Args:
        given: The messages of one completion.
        turns: The policy's turns, by the tokens.

    Raises:
        NoMessages: one has no role, text or readable call; or there is not one message for each turn.
    """
    listed: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    if not all(isinstance(each, Mapping) and each.get("role") in _ROLES for each in listed):
        raise NoMessages(f"takes messages, each a dict with the role {', '.join(_ROLES)}; here {excerpt(repr(given))}")
    said = sum(message["role"] == "assistant" for message in listed)
    if said != turns:
        raise NoMessages(
            f"takes a message of the assistant for each of the {turns} turns that env_mask has; here {said}"
        )
    return [_read(message) for message in listed]


def _read(message: Mapping[str, Any]) -> Message:
    calls = message.get("tool_calls") or []
    content = "" if message.get("content") is None and calls else message.get("content")
    if not isinstance(content, str):
        raise NoMessages(f"takes a text under 'content'; here {excerpt(repr(dict(message)))}")
    read: Message = {**message, "content": content}
    if calls:
        read["tool_calls"] = [_read_call(call) for call in calls]
    try:
        json.dumps(read)
    except (TypeError, ValueError) as error:
        raise NoMessages(f"takes what JSON can write ({error}); here {excerpt(repr(read))}") from error
    return read


def _read_call(call: Any) -> Message:
    try:
        function = call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        return {**call, "function": {**function, "name": str(function["name"]), "arguments": dict(arguments)}}
    except (KeyError, TypeError, ValueError) as error:
        raise NoMessages(
            "takes calls such as {'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}; here "
            f"{excerpt(repr(call))}"
        ) from error
