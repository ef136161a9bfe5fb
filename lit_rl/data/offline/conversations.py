"""Strings and conversations of a row: checked, split and compared."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.data.formats import add_system_prompt, checked_message, split_prompt
from lit_rl.data.image_parts import text_of
from lit_rl.errors import DataError
from lit_rl.rollout import Message, Prompt

Text = str | list[Message]
"""A string, or chat messages."""


def conversation(value: Any, where: str, *, prompt: bool = False) -> Text:
    """Return a string or a list of messages, checked and normalized by the rules of prompts; an empty list stays one.

    Args:
        value: Value of the column.
        where: Opens every message; names the row and the column.
        prompt: The messages must end before the assistant speaks.

    Raises:
        DataError: neither a text nor a sound list of messages.
    """
    if not isinstance(value, str | list):
        raise DataError(
            f"{where} is {excerpt(repr(value))} ({type(value).__name__}); allowed are a string or a list of chat "
            "messages."
        )
    if value in ("", []):
        return value
    if prompt or isinstance(value, str):
        return split_prompt({"prompt": value}, where)[0]
    return [checked_message(message, f"{where}: message {i}") for i, message in enumerate(value)]


def is_blank(text: Text) -> bool:
    """Tell whether a text is blank: white space, or messages without words and tool calls, the system's left out."""
    if isinstance(text, str):
        return not text.strip()
    spoken = (m for m in text if m["role"] not in ("system", "developer"))
    return not any(
        text_of(m["content"]).strip() or isinstance(m["content"], list) or m.get("tool_calls") for m in spoken
    )


def with_system(prompt: Prompt, system_prompt: str | None) -> Prompt:
    """Add the system prompt, unless the prompt is empty."""
    return add_system_prompt(prompt, system_prompt) if prompt else prompt


def together(
    prompt: Any, completions: Mapping[str, Any], where: str, system: str | None
) -> tuple[Prompt, tuple[Text, ...]]:
    """Return checked prompt and completions, all strings or all messages."""
    begin = conversation(prompt, f"{where}: prompt", prompt=True)
    texts = tuple(conversation(text, f"{where}: {name}") for name, text in completions.items())
    if isinstance(begin, list) and begin and all(text[: len(begin)] == begin for text in texts):
        # Some data sets repeat the prompt's messages in front of each completion.
        texts = tuple(text[len(begin) :] for text in texts)
    if system is not None or any(isinstance(text, list) for text in (begin, *texts)):
        begin, texts = as_messages(begin, texts, system)
    for name, text in zip(completions, texts):
        if isinstance(text, list) and text and (text[0]["role"], text[-1]["role"]) != ("assistant", "assistant"):
            raise DataError(
                f"{where}: {name} begins with the message of the {text[0]['role']} and ends with that of the "
                f"{text[-1]['role']}; a completion begins and ends with the assistant's. Put what stands before into "
                "the prompt."
            )
    return begin, texts


def as_messages(prompt: Prompt, texts: Sequence[Text], system: str | None) -> tuple[Prompt, tuple[Text, ...]]:
    """Convert strings to the user's and the assistant's messages; blank ones become no message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    replies = (
        [{"role": "assistant", "content": text}] if isinstance(text, str) and text.strip() else text or []
        for text in texts
    )
    return with_system(messages, system), tuple(reply if isinstance(reply, list) else [] for reply in replies)


def is_whole(text: Text) -> bool:
    """Tell whether messages include the prompt: they do not begin with the assistant's."""
    return isinstance(text, list) and bool(text) and text[0]["role"] != "assistant"


def last_turn(messages: Text) -> tuple[list[Message], list[Message]]:
    """Split off the last message where it is the assistant's; otherwise return an empty list and all messages."""
    assert isinstance(messages, list)
    if messages and messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1:]
    return [], messages


def shared_messages(chosen: list[Message], rejected: list[Message]) -> int:
    """Return the number of leading messages that are the prompt of both: the common ones, up to an assistant's turn.

    0 where no prompt is left after which the assistant speaks in both.
    """
    count = _common(chosen[:-1], rejected[:-1])
    while count and chosen[count - 1]["role"] == "assistant":
        count -= 1
    roles = {side[count]["role"] for side in (chosen, rejected) if len(side) > count}
    return count if roles == {"assistant"} and not is_blank(chosen[:count]) else 0


def shared_text(chosen: str, rejected: str) -> int:
    """Return the number of leading characters that are the prompt of both: the common ones, cut back to a word
    boundary.

    No word is split: where both go on inside one, or one side ends, the prompt ends before that word. A single space
    before the first word that differs belongs to the completions, as in TRL's `extract_prompt`, since tokenizers bind
    it to the word. (That function splits words, and takes all but the last character where one text begins the other.)
    """
    count = _common(chosen, rejected)
    if count == min(len(chosen), len(rejected)):
        while count and not chosen[count - 1].isspace():
            count -= 1
    elif any(_inside_word(side, count) for side in (chosen, rejected)):
        while count and _of_word(chosen[count - 1]):
            count -= 1
    return count - 1 if count and chosen[count - 1] == " " else count


def _common(one: Any, other: Any) -> int:
    pairs = enumerate(zip(one, other))
    return next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def _inside_word(text: str, place: int) -> bool:
    return 0 < place < len(text) and _of_word(text[place - 1]) and _of_word(text[place])


def _of_word(character: str) -> bool:
    # Marks and joiners continue the character before them.
    return character.isalnum() or character in "_'\u2019\u200d" or unicodedata.category(character).startswith("M")
