"""What a chat template leaves out of messages: it refuses nothing, and the policy learns from what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from lit_rl.callbacks.text import printable
from lit_rl.chat_template import apply_chat_template
from lit_rl.data.image_parts import text_of
from lit_rl.rollout import Message

_ROLES = ("system", "developer", "user")
"""Whose words a template has no reason to leave out: earlier thoughts of the assistant are left out on purpose."""


def say_template(
    console: Console, tokenizer: Any, prompts: Sequence[Sequence[Message]], kwargs: Mapping[str, Any]
) -> None:
    """Name the roles whose words are missing, and say where the assistant's turn is not opened.

    Args:
        tokenizer: Whose chat template it is.
        prompts: Messages that it has rendered.
        kwargs: Further arguments of the template.
    """
    lost: dict[str, str] = {}
    opened = False
    for messages in prompts:
        plain, told = (
            str(apply_chat_template(tokenizer, messages, tokenize=False, add_generation_prompt=opening, **kwargs))
            for opening in (False, True)
        )
        opened = opened or plain != told
        for message in messages:
            words = text_of(message["content"]).strip()
            if message["role"] in _ROLES and words not in told:
                lost.setdefault(message["role"], words)
    for role, words in lost.items():
        console.print(
            Text(f"\nThe chat template leaves out words of the {role}: {printable(words, 80)}", style="yellow")
        )
    if prompts and not opened:
        why = "add_generation_prompt changes nothing: look whether the prompts above end where it should begin"
        console.print(Text(f"\nThe chat template does not open the assistant's turn ({why}).", style="yellow"))
