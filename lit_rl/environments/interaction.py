"""Environments and a policy's tokenizer: from the prompts of a batch to prompts as they are opened, and a responder."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.data.image_prompts import Processor
from lit_rl.data.images import MAX_IMAGE_PIXELS
from lit_rl.data.message_forms import told_of
from lit_rl.data.templates import encode_prompt, kwargs_of_row
from lit_rl.environments.base import Environment, Opening
from lit_rl.environments.channels import said_and_thought, speaks_on_channels
from lit_rl.environments.conversation import Conversations, Reading, Row
from lit_rl.environments.factory import EnvironmentFactory, EnvironmentKind
from lit_rl.environments.frames import ChatFrames, Frames, TextFrames, check_tools_are_told, literal_ids
from lit_rl.environments.journal import EpisodeJournal, Journal
from lit_rl.environments.opened import CannotBegin, OpenedPrompt, PromptOpener
from lit_rl.environments.parser_choice import parser_for
from lit_rl.environments.parsers import Parser, RegexParser
from lit_rl.environments.remembered import RememberedEnvironment
from lit_rl.environments.rewriting import EVERY, TemplateRewriting
from lit_rl.environments.runner import Runner
from lit_rl.environments.source import EpisodeRequest, EpisodeSource
from lit_rl.errors import GenerationError
from lit_rl.rollout import Completions, PromptBatch
from lit_rl.vision import PromptVision

_SEED_BITS = 31
_REMEMBERED = 64
"""Different arguments of rows for which what the tokenizer makes of an environment is kept."""


@dataclass(frozen=True)
class _Ready:
    """A kind of environment with what the policy's tokenizer makes of it."""

    kind: EnvironmentKind
    frames: Frames
    parser: Parser | None
    template_kwargs: dict[str, Any]
    """Arguments that its prompts are rendered with: its tools among them."""


class Interaction(EpisodeSource):
    """The environments that answer the policy of a run.

    Args:
        factory: Makes the environments.
        tokenizer: Tokenizer of the policy.
        eos_ids: Every token that ends a turn.
        chat: True if prompts are chat messages, not texts.
        template_kwargs: Arguments that prompts are rendered with, of the data.
        journal: Journal of the run; None: replies are written nowhere.
        processor: Processor of a policy over images; None: it reads text.
        max_image_pixels: Width times height of an image that a tool or an environment returns, at most.

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
        journal: Journal | None = None,
        processor: Processor | None = None,
        max_image_pixels: int = MAX_IMAGE_PIXELS,
    ) -> None:
        self._processor = processor
        self.journal = journal
        self.factory, self._tokenizer, self._eos_ids = factory, tokenizer, tuple(eos_ids)
        self._chat, self._template_kwargs = chat, dict(template_kwargs)
        self._ready = {name: self._made_ready(kind, {}) for name, kind in factory.kinds.items()}
        self._ready_of_rows: dict[tuple[str, str], _Ready] = {}
        """Prepared kinds of the latest rows with chat template arguments of their own, by the kind and these."""
        self._tools_of_rows = 0
        """Tokens of the longest tools of such a row."""
        self._reading = Reading(
            self._text,
            self._thought,
            self._written,
            self._shortened,
            frozenset(eos_ids),
            placeholders=frozenset(() if processor is None else processor.placeholders),
            max_image_pixels=None if processor is None else max_image_pixels,
        )
        self._on_channels = speaks_on_channels(tokenizer)
        self._opener = PromptOpener(tokenizer, processor, self._shortened, factory.max_observation_tokens)
        self._runner, self._told = Runner(), set[str]()
        self._rewriting = TemplateRewriting(tokenizer)

    @property
    def settings(self) -> EnvironmentFactory:
        return self.factory

    def saved(self, rollout: int) -> None:
        if self.journal is not None:
            self.journal.saved(rollout)

    def forget(self) -> None:
        """Forget the journal of the current rollout: its replies are requested again when the run goes on."""
        if self.journal is not None:
            self.journal.forget()

    @property
    def max_image_pixels(self) -> int | None:
        """Largest image that a tool or an environment may return, in pixels; None: the policy reads text."""
        return self._reading.max_image_pixels

    @property
    def parsers(self) -> dict[str, Parser | None]:
        """Parsers of tool calls, by the kind of environment; None where it has no tools."""
        return {name: ready.parser for name, ready in self._ready.items()}

    # ------------------------------------------------------------------ lengths

    def lengths(self, longest: int) -> dict[str, int]:
        opens = any(ready.kind.opens for ready in self._ready.values())
        return {
            "the longest prompt": longest,
            "the tools": max(self._tools_of_rows, *map(self._tool_tokens, self._ready.values())),
            "env.max_observation_tokens": self.factory.max_observation_tokens if opens else 0,
            "env.max_tokens": self.factory.max_tokens,
        }

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

    def draw(self, request: EpisodeRequest) -> Completions:
        asked, sampling = request.prompts, request.sampling
        of_group = [key for key in asked.keys for _ in range(asked.group_size)]
        seeds = request.row_keys if self.factory.seed == "sample" else of_group
        journal = None
        if self.journal is not None and request.batch.rollout >= 0:  # validations are not journaled
            journal = self.journal.request(request.batch.rollout, request)
        with ExitStack() as closes:

            def begun() -> tuple[list[OpenedPrompt], Conversations]:
                opened, conversations = self.begin(
                    request.batch, seeds, max_new_tokens=sampling.max_new_tokens, journal=journal, seen=asked.vision
                )
                closes.enter_context(closing(conversations))
                return opened, conversations

            try:
                opened, conversations = request.agree(begun)
            except GenerationError:
                self.forget()  # a fixed environment must not replay a wrong beginning
                raise
            told = replace(asked, token_ids=[each.ids for each in opened], responder=conversations)
            if any(each.seen is not None for each in opened):
                told = replace(told, vision=[each.seen for each in opened])
            completions = request.generate(told, sampling)
            drawn = replace(completions, episodes=conversations.episodes())
            rollout = request.batch.rollout
            due = rollout >= 0 and rollout % EVERY == 0  # validations are below 0
            if due and (frames := conversations.chat_frames):
                self._rewriting.look(drawn, frames)
        self.waited += conversations.waited
        return drawn

    def pop_metrics(self) -> Mapping[str, tuple[float, float]]:
        return self._rewriting.pop_metrics()

    def begin(
        self,
        batch: PromptBatch,
        seeds: Sequence[int],
        *,
        max_new_tokens: int,
        journal: Callable[..., EpisodeJournal] | None = None,
        seen: Sequence[PromptVision | None] = (),
    ) -> tuple[list[OpenedPrompt], Conversations]:
        """Open the episodes of a batch.

        Args:
            batch: The prompts.
            seeds: One a completion, any integers; the completions of a prompt are neighbours.
            max_new_tokens: Tokens of one turn.
            journal: The part of an episode, by row, occurrence, sample and seed; see `Journal.request`.
            seen: Vision inputs of each prompt; empty: no prompt has images.

        Returns:
            Each prompt as it is opened, and what answers its completions. To be closed.

        Raises:
            GenerationError: the environments of one prompt began differently.
        """
        group = len(seeds) // len(batch)
        kept: list[EpisodeJournal | None] = [None] * len(seeds)
        if journal is not None:
            names = [(batch.rows[n // group], batch.occurrences[n // group], n % group) for n in range(len(seeds))]
            kept = [journal(*name, seed) for name, seed in zip(names, seeds)]
        rows = [self._row(batch, number // group, seed, kept[number]) for number, seed in enumerate(seeds)]
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
                of_prompt = seen[number] if seen else None
                prompts.append(self._opened(batch, number, of_prompt, rows[part], openings[part]))
        except BaseException:
            conversations.close()
            raise
        return prompts, conversations

    def _row(self, batch: PromptBatch, number: int, seed: int, journal: EpisodeJournal | None) -> Row:
        columns = {"prompt": batch.prompts[number], **{name: of[number] for name, of in batch.columns.items()}}
        ready = self.ready_for(columns)
        make: Callable[[], Environment] = partial(ready.kind.make, ready.parser)
        if self.factory.pool is not None or journal is not None:
            make = partial(RememberedEnvironment, make, has_state=ready.kind.has_state, journal=journal)
        return Row(make, ready.frames, seed & ((1 << _SEED_BITS) - 1), copy.deepcopy(columns))

    def _opened(
        self,
        batch: PromptBatch,
        number: int,
        seen: PromptVision | None,
        rows: Sequence[Row],
        openings: Sequence[Opening],
    ) -> OpenedPrompt:
        """Return a prompt with what its environments began with."""
        sound = [opening for opening, row in zip(openings, rows) if not row.failed]
        opening = sound[0] if sound else None
        if differing := [other for other in sound if other != opening]:
            raise GenerationError(
                f"The environments of one prompt began with {excerpt(repr(opening))} and with "
                f"{excerpt(repr(differing[0]))}: completions of a group answer the same prompt. Let reset depend on "
                f"nothing but its arguments and its seed, and take env.seed=group (it is {self.factory.seed})."
            )
        ready = self.ready_for(rows[0].columns)
        kwargs = {**told_of(rows[0].columns.get("tools")), **ready.template_kwargs}
        where = f"the prompt of row {batch.rows[number]}"
        opened = self._opener.told(OpenedPrompt(batch.prompts[number], batch.prompt_ids[number], seen), where, kwargs)
        if opening is not None:
            try:
                opened = self._opener.begun(opened, opening, where, kwargs)
            except CannotBegin as why:
                for row in rows:
                    row.end, row.error = "failed", str(why)
        for row in rows:
            row.prompt = opened.prompt
        return opened

    # ------------------------------------------------------------------ the tokenizer

    def ready_for(self, columns: Mapping[str, Any]) -> _Ready:
        """Return the kind of environment of a row, made ready for its own arguments of the chat template.

        Raises:
            ConfigError: with these the template cannot render what answers the policy.
        """
        kind, own = self.factory.kind_of(columns), kwargs_of_row(columns, "a row of env=") if self._chat else {}
        if not own:
            return self._ready[kind]
        key = kind, json.dumps(own, sort_keys=True, default=str)
        ready = self._ready_of_rows.pop(key, None)
        if ready is None:
            ready = self._made_ready(self.factory.kinds[kind], own)
            self._tools_of_rows = max(self._tools_of_rows, self._tool_tokens(ready))
            if len(self._ready_of_rows) >= _REMEMBERED:
                del self._ready_of_rows[next(iter(self._ready_of_rows))]  # least recently used
        self._ready_of_rows[key] = ready
        return ready

    def _made_ready(self, kind: EnvironmentKind, own: Mapping[str, Any]) -> _Ready:
        chat, template_kwargs = self._chat, {**self._template_kwargs, **own}
        tools = kind.toolbox.schemas if kind.toolbox is not None else None
        parser = None
        if tools is not None:
            rendered_with = {**template_kwargs, "tools": tools} if chat else None
            parser = parser_for(self.factory.parser, self._tokenizer, tools, self.factory.call_pattern, rendered_with)
        if not chat:
            end = self._tokenizer.eos_token_id
            return _Ready(kind, TextFrames(self._tokenizer, end), parser, {})
        settings = dict(template_kwargs)
        frames = ChatFrames(
            self._tokenizer,
            eos_ids=self._eos_ids,
            kinds=(kind.answers_as,),
            tools=tools,
            calls_are_text=isinstance(parser, RegexParser),
            chat_template_kwargs=settings,
            processor=self._processor,
        )
        if tools is not None:
            settings["tools"] = tools
            if not isinstance(parser, RegexParser):  # prompts themselves describe a custom form of calls
                check_tools_are_told(self._tokenizer, tools, settings)
        return _Ready(kind, frames, parser, settings)

    def _text(self, ids: Sequence[int]) -> str:
        if self._on_channels:
            return said_and_thought(self._written(ids))[0]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _thought(self, ids: Sequence[int]) -> str:
        return said_and_thought(self._written(ids))[1] if self._on_channels else ""

    def _written(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def _shortened(self, text: str, most: int) -> str:
        if len(text.encode()) <= most:  # a token is a byte or more
            return text
        ids = literal_ids(self._tokenizer, text)
        if len(ids) <= most:
            return text
        mark = f" [cut: of {len(ids)} tokens]"
        room = most - len(literal_ids(self._tokenizer, mark))
        return f"{self._tokenizer.decode(ids[:room])}{mark}" if room > 0 else str(self._tokenizer.decode(ids[:most]))
