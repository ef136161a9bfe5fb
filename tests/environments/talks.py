"""A policy that says what a test wants, in conversation with real environments and the real tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from chat_templates import tokenizer_of
from transformers import AutoTokenizer

from lit_rl.core.episode import EnvironmentTurn, Episode, PolicyTurn, Prompt
from lit_rl.core.model_paths import TINY
from lit_rl.core.rollout import PromptBatch
from lit_rl.environments.factory import EnvironmentFactory
from lit_rl.environments.interaction import Interaction

TURN = 400
"""Tokens of a turn at most."""


@functools.cache
def bytes_tokenizer() -> Any:
    """Of the shipped policy: a token a byte, texts for prompts, and no chat template."""
    return AutoTokenizer.from_pretrained(TINY)


def texts(factory: EnvironmentFactory) -> Interaction:
    """For prompts that are texts."""
    tokenizer = bytes_tokenizer()
    return Interaction(factory, tokenizer, eos_ids=(tokenizer.eos_token_id,), chat=False, template_kwargs={})


def chats(factory: EnvironmentFactory, template: str = "qwen2_5") -> Interaction:
    """For prompts that are chats, by a template of another family."""
    tokenizer, ends = tokenizer_of(template)
    return Interaction(factory, tokenizer, eos_ids=tuple(ends), chat=True, template_kwargs={})


def asked(*prompts: Prompt, **columns: Sequence[Any]) -> PromptBatch:
    tokenizer = bytes_tokenizer()
    ids = [list(tokenizer(each)["input_ids"]) if isinstance(each, str) else [1] for each in prompts]
    return PromptBatch(prompts, ids, columns, list(range(len(prompts))), [0] * len(prompts))


class Talk:
    """The conversations of one request, of which a test says the policy's part."""

    def __init__(
        self, interaction: Interaction, batch: PromptBatch, seeds: Sequence[int], turn: int = TURN, journal: Any = None
    ) -> None:
        self._interaction = interaction
        opened, self.conversations = interaction.begin(batch, seeds, max_new_tokens=turn, journal=journal)
        self.prompt_ids = [each.ids for each in opened]
        self._turns: dict[int, int] = {}

    def say(self, row: int, text: str, *, ended: bool = True) -> None:
        """The policy says it; an EOS token ends it, unless it is cut."""
        tokenizer = self._interaction._tokenizer
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        ids += [self._interaction._eos_ids[0]] if ended else []
        turn = self._turns[row] = self._turns.get(row, -1) + 1
        self.conversations.tell(PolicyTurn(row, turn, ids, ended))

    def heard(self, row: int, text: str, *, ended: bool = True) -> str | None:
        """What the policy reads then, as text; None: it is over."""
        self.say(row, text, ended=ended)
        (answer,) = self.conversations.answers(wait=True)
        assert answer.row == row
        return self.read(answer)

    def read(self, answer: EnvironmentTurn) -> str | None:
        ids = answer.token_ids
        return None if ids is None else str(self._interaction._tokenizer.decode(ids))

    def over(self) -> tuple[Episode, ...]:
        """The episodes, when all are over."""
        try:
            return self.conversations.episodes()
        finally:
            self.conversations.close()


def one(interaction: Interaction, *turns: str, prompt: Prompt = "0..9=", seed: int = 7, **columns: Any) -> Episode:
    """The episode in which the policy says this, until it is over or there is no more to say."""
    talk = Talk(interaction, asked(prompt, **{name: [value] for name, value in columns.items()}), [seed])
    for text in turns:
        if talk.heard(0, text) is None:
            break
    return talk.over()[0]
