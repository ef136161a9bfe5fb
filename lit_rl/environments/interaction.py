"""Environments and a policy's tokenizer: from the prompts of a batch to prompts as they are opened, and a responder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.data.templates import control_tokens, encode_prompt
from lit_rl.environments.base import Opening
from lit_rl.environments.conversation import Conversations, Reading, Row
from lit_rl.environments.factory import EnvironmentFactory, EnvironmentKind
from lit_rl.environments.frames import ChatFrames, Frames, TextFrames
from lit_rl.environments.parsers import Parser, parser_for
from lit_rl.environments.runner import Runner
from lit_rl.environments.tools import as_text
from lit_rl.episodes import Episode
from lit_rl.errors import ConfigError, GenerationError
from lit_rl.rollout import Prompt, PromptBatch

_SEED_BITS = 31


@dataclass(frozen=True)
class _Ready:
    """A kind of environment with what the policy's tokenizer makes of it."""

    kind: EnvironmentKind
    frames: Frames
    parser: Parser | None
    template_kwargs: dict[str, Any]
    """What its prompts are rendered with: its tools among them."""


class Interaction:
    """What answers the policy of a run.

    Args:
        factory: Makes the environments.
        tokenizer: Of the policy.
        eos_ids: Every token that ends a turn.
        chat: Whether prompts are chat messages; else they are texts.
        template_kwargs: What prompts are rendered with, of the data.

    Raises:
        ConfigError: the chat template cannot render what answers the policy, or nothing says how calls are written.
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int],
        chat: bool,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self.factory, self._tokenizer, self._eos_ids = factory, tokenizer, tuple(eos_ids)
        self._ready = {name: self._made_ready(kind, chat, template_kwargs) for name, kind in factory.kinds.items()}
        self._reading = Reading(self._text, self._written, self._shortened, frozenset(eos_ids))
        self._control = control_tokens(tokenizer)
        self._runner, self._told = Runner(), set[str]()

    # ------------------------------------------------------------------ lengths

    def lengths(self, longest: int) -> dict[str, int]:
        """The tokens that an episode may have, by what asks for them; the data's prompts have at most `longest`."""
        opens = any(ready.kind.opens for ready in self._ready.values())
        return {
            "the longest prompt": longest,
            "the tools": max(map(self._tool_tokens, self._ready.values())),
            "env.max_observation_tokens": self.factory.max_observation_tokens if opens else 0,
            "env.max_tokens": self.factory.max_tokens,
        }

    def longest_prompt(self, longest: int) -> int:
        """Tokens that a prompt may have with tools and an opening, where it has at most so many without."""
        return sum(self.lengths(longest).values()) - self.factory.max_tokens

    def _tool_tokens(self, ready: _Ready) -> int:
        if not ready.template_kwargs.get("tools"):
            return 0
        asked: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        without = {key: value for key, value in ready.template_kwargs.items() if key != "tools"}
        lengths = [
            len(encode_prompt(self._tokenizer, asked, chat_template_kwargs=kwargs))
            for kwargs in (ready.template_kwargs, without)
        ]
        return max(0, lengths[0] - lengths[1])

    # ------------------------------------------------------------------ a batch

    def begin(
        self, batch: PromptBatch, seeds: Sequence[int], *, max_new_tokens: int
    ) -> tuple[list[list[int]], Conversations]:
        """Open the episodes of a batch.

        Args:
            batch: The prompts.
            seeds: One a completion, any integers; the completions of a prompt are neighbours.
            max_new_tokens: Of one turn.

        Returns:
            The tokens of each prompt as it is opened, and what answers its completions. To be closed.

        Raises:
            GenerationError: the environments of one prompt began differently.
        """
        group = len(seeds) // len(batch)
        rows = [self._row(batch, number // group, seed) for number, seed in enumerate(seeds)]
        conversations = Conversations(
            rows,
            self.factory,
            self._reading,
            max_new_tokens=max_new_tokens,
            runner=self._runner,
            told=self._told,
        )
        try:
            openings = conversations.open()
            prompts = []
            for number in range(len(batch)):
                part = slice(number * group, (number + 1) * group)
                prompts.append(self._opened(batch, number, rows[part], openings[part]))
        except BaseException:
            conversations.close()
            raise
        return prompts, conversations

    def _row(self, batch: PromptBatch, number: int, seed: int) -> Row:
        columns = {"prompt": batch.prompts[number], **{name: of[number] for name, of in batch.columns.items()}}
        ready = self._ready[self.factory.kind_of(columns)]
        row = Row(None, ready.frames, seed & ((1 << _SEED_BITS) - 1), columns)
        try:
            row.environment = ready.kind.make(ready.parser)
        except Exception as error:  # the constructor is the user's
            row.end, row.error = "failed", excerpt(f"{type(error).__name__}: {error}", 200)
        return row

    def _opened(self, batch: PromptBatch, number: int, rows: Sequence[Row], openings: Sequence[Opening]) -> list[int]:
        """The tokens of a prompt with what its environments began with."""
        prompt, sound = batch.prompts[number], [i for i, row in enumerate(rows) if row.end is None]
        opening = openings[sound[0]] if sound else None
        if differing := next((openings[i] for i in sound if openings[i] != opening), None):
            raise GenerationError(
                f"The environments of one prompt began with {excerpt(repr(opening))} and with "
                f"{excerpt(repr(differing))}: completions of a group answer the same prompt. Let reset depend on "
                f"nothing but its arguments and its seed, and take env.seed=group (it is {self.factory.seed})."
            )
        opened = self._joined(prompt, opening)
        for row in rows:
            row.prompt = opened
        ready = self._ready[self.factory.kind_of(rows[0].columns)]
        if opened is prompt and not ready.template_kwargs.get("tools"):
            return batch.prompt_ids[number]
        where = f"the prompt of row {batch.rows[number]}, as env= opens it"
        kwargs = ready.template_kwargs
        return encode_prompt(self._tokenizer, opened, where=where, chat_template_kwargs=kwargs, control=self._control)

    def _joined(self, prompt: Prompt, opening: Opening) -> Prompt:
        if opening is None or opening == "":
            return prompt
        if isinstance(prompt, str):
            messages = [] if isinstance(opening, str) else [message["content"] for message in opening]
            text = opening if isinstance(opening, str) else "".join(messages)
            return prompt + self._shortened(as_text(text, "reset"), self.factory.max_observation_tokens)
        if isinstance(opening, str):
            last, most = prompt[-1], self.factory.max_observation_tokens
            return [*prompt[:-1], {**last, "content": f"{last['content']}{self._shortened(opening, most)}"}]
        share = max(1, self.factory.max_observation_tokens // len(opening))
        return [*prompt, *({**each, "content": self._shortened(each["content"], share)} for each in opening)]

    def check_failures(self, episodes: Sequence[Episode]) -> None:
        """Refuse to go on where too many episodes failed.

        Raises:
            GenerationError: more than ``env.max_failed`` of them.
        """
        errors = Counter(each.error for each in episodes if each.failed)
        failed = sum(errors.values())
        if failed > self.factory.max_failed * len(episodes):
            (error, times), *_ = errors.most_common(1)
            raise GenerationError(
                f"{failed} of {len(episodes)} episodes failed or took too long, more than "
                f"env.max_failed={self.factory.max_failed:g} of them; {times} times: {error}. Mend the environment, or "
                "allow more with env.max_failed, env.step_timeout or env.episode_timeout."
            )

    # ------------------------------------------------------------------ the tokenizer

    def _made_ready(self, kind: EnvironmentKind, chat: bool, template_kwargs: Mapping[str, Any]) -> _Ready:
        tools = kind.toolbox.schemas if kind.toolbox is not None else None
        parser = None
        if tools is not None:
            parser = parser_for(self.factory.parser, self._tokenizer, tools, self.factory.call_pattern)
        if not chat:
            end = self._tokenizer.eos_token_id
            return _Ready(kind, TextFrames(self._tokenizer, end), parser, {})
        settings = dict(template_kwargs)
        frames = ChatFrames(
            self._tokenizer,
            eos_ids=self._eos_ids,
            kinds=(kind.answers_as,),
            tools=tools,
            chat_template_kwargs=settings,
        )
        if tools is not None:
            settings["tools"] = tools
            self._check_tools_are_told(tools, settings)
        return _Ready(kind, frames, parser, settings)

    def _check_tools_are_told(self, tools: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
        asked = [{"role": "user", "content": "a"}]
        text = self._tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **settings)
        names = [tool["function"]["name"] for tool in tools]
        if missing := [name for name in names if name not in str(text)]:
            raise ConfigError(
                f"The chat template does not tell the policy of the tools: {', '.join(missing)} is not in what it "
                "renders. Give one that does with model.chat_template=FILE, or take another model."
            )

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _written(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def _shortened(self, text: str, most: int) -> str:
        if len(text.encode()) <= most:  # a token is a byte or more
            return text
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) <= most:
            return text
        return f"{self._tokenizer.decode(ids[:most])} [cut: {len(ids) - most} more tokens]"
