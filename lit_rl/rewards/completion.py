"""What a reward function sees of a completion, and the text of it."""

from __future__ import annotations

from collections.abc import Sequence

from lit_rl.errors import RewardError
from lit_rl.rollout import Message

Completion = str | Sequence[Message]
"""A completion as reward functions see it: text, or messages where the prompt is a list of messages. Those of an
episode are by the assistant, with the answers of tools and environments between them."""


def text_of(completion: Completion) -> str:
    """Return the text of a completion: itself, or the contents of its assistant messages joined by newlines.

    Text of others between them earns no reward.

    Raises:
        RewardError: it is neither text nor messages with text (None counts as empty: a message that only calls a tool).
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list | tuple):
        raise RewardError(f"a completion is text or a list of messages, not {type(completion).__name__}.")
    return "\n".join(content_of(message) for message in completion if _by_the_policy(message))


def _by_the_policy(message: Message) -> bool:
    return not isinstance(message, dict) or message.get("role", "assistant") == "assistant"


def content_of(message: Message) -> str:
    """Return the text of one message of any role; "" where its content is None.

    Raises:
        RewardError: it is no message with text.
    """
    content = message.get("content", "") if isinstance(message, dict) else message
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    if isinstance(content, str) and isinstance(message, dict):
        return content
    raise RewardError(f"a message is {message!r:.80}; it needs a text under 'content'.")
