"""The episodes of a batch: prompts are opened with tools and first observations, and environments answer the policy."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lit_rl.core.chat_template import apply_chat_template
from lit_rl.core.episode import Message, Prompt
from lit_rl.core.errors import ConfigError, DataError, GenerationError, excerpt
from lit_rl.core.rollout import Completions, PromptBatch
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.core.visuals import ImageRef
from lit_rl.data.message_forms import tools_argument
from lit_rl.data.rendering import control_tokens, encode_prompt, render_prompt, row_template_kwargs
from lit_rl.data.row_visuals import MAX_IMAGE_PIXELS
from lit_rl.data.visual_prompts import Processor, shown_again
from lit_rl.environments.conversations import Conversations, EpisodeRow, TurnCodec
from lit_rl.environments.environment_base import Environment, EpisodeRequest, EpisodeSource, Opening
from lit_rl.environments.episode_replay import EpisodeJournal, Journal, ReplayableEnvironment
from lit_rl.environments.factory import EnvironmentFactory, EnvironmentKind
from lit_rl.environments.frames import ChatFrames, Frames, TextFrames, check_tools_are_rendered, literal_ids
from lit_rl.environments.observations import (
    Content,
    ImageReturned,
    images_of_content,
    texts_of_content,
    with_texts,
    without_payload,
)
from lit_rl.environments.parser_base import Parser
from lit_rl.environments.runner import Runner
from lit_rl.environments.template_checks import CHECK_EVERY, TemplateRewriteCheck
from lit_rl.environments.tool_parsers import RegexParser, parser_for


class OpeningFailed(Exception):
    """The error for a first observation that cannot be added to the prompt: the episodes fail with its message."""


@dataclass(frozen=True)
class OpenedPrompt:
    """A prompt as the policy reads it."""

    prompt: Prompt
    ids: list[int]
    seen: PromptVision | None
    """The model's vision inputs. None: the prompt shows no image."""


class PromptOpener:
    """A renderer of prompts whose episodes begin with more than the data hold.

    A prompt that shows images is processed again as a whole, so that its placeholders are expanded as those of the data
    were.

    Args:
        tokenizer: Tokenizer of the policy.
        processor: Processor of a policy over images; None: it reads text.
        shortened: Function that cuts a text to a number of tokens, and marks the cut.
        most: Tokens that an environment may begin with.

    Raises:
        ConfigError: a placeholder of images cannot be written as text.
    """

    def __init__(
        self, tokenizer: Any, processor: Processor | None, shortened: Callable[[str, int], str], most: int
    ) -> None:
        self._tokenizer, self._processor = tokenizer, processor
        self._shortened, self._most = shortened, most
        self._control = control_tokens(tokenizer)
        if processor is not None:
            self._control = sorted({*self._control, *processor.reserved})
            # Replies of tools and environments may spell a placeholder.
            for token in processor.placeholders:
                text = str(tokenizer.decode([token]))
                if token in literal_ids(tokenizer, text):
                    raise ConfigError(
                        f"With env= others than the policy write texts, and its tokenizer turns the plain text "
                        f"{text!r} into the placeholder of an image, because that is not marked as a special token. "
                        "Mark it as special in the tokenizer's files, or leave env out."
                    )

    def with_opening(
        self, plain: OpenedPrompt, opening: str | Sequence[Message], where: str, template_kwargs: Mapping[str, Any]
    ) -> OpenedPrompt:
        """Return the prompt with the first observation, in which control tokens are text.

        Args:
            plain: The prompt with its tools.
            opening: The first observation, for the end of the last message, or messages after it.
            where: The prompt, for messages.
            template_kwargs: Arguments that it is rendered with.

        Raises:
            OpeningFailed: the first observation is too long, has a control token beside images, or an image that the
                processor refuses.
            ImageReturned: it begins with an image, and the prompt is plain text.
        """
        prompt, contents = plain.prompt, _contents(opening)
        images = tuple(image for content in contents for image in images_of_content(content))
        texts = [text for content in contents for text in texts_of_content(content)]
        parts = [self._shortened(part, max(1, self._most // len(texts))) for part in texts]
        if isinstance(prompt, str):
            if images:
                raise ImageReturned(
                    "An environment began with an image, and the prompts of this run are plain text, in which nothing "
                    'says where an image stands. Make them lists of messages: [{"role": "user", "content": ...}].'
                )
            text = "".join(parts)
            found = OpenedPrompt(prompt + text, [*plain.ids, *literal_ids(self._tokenizer, text)], None)
        else:
            opened = _with_texts(prompt, opening, parts)
            spelled = next((token for token in self._control for part in parts if token in part), None)
            if spelled is None:
                found = self.render(opened, plain.seen, where, template_kwargs, images)
            elif plain.seen is not None or images:  # a processor tokenises whole texts only
                raise OpeningFailed(
                    f"the first observation holds the text {spelled!r}, which is a control token of the policy, and a "
                    "prompt with images cannot hold it as text: let reset return it in other words"
                )
            else:
                marks = [f"qq{number}opening{number}qq" for number in range(len(parts))]
                marked = _with_texts(prompt, opening, marks)
                found = OpenedPrompt(opened, self._ids_around(marked, marks, parts, template_kwargs), None)
        if len(found.ids) - len(plain.ids) > self._most:
            raise OpeningFailed(
                f"the first observation is longer than env.max_observation_tokens={self._most}: raise it, or let reset "
                "return a shorter one"
            )
        return found

    def render(
        self,
        prompt: Prompt,
        seen: PromptVision | None,
        where: str,
        template_kwargs: Mapping[str, Any],
        returned: tuple[ImageRef, ...] = (),
    ) -> OpenedPrompt:
        """Return the prompt as the policy reads it, with images of the first observation after those of the data."""
        how = {"where": where, "chat_template_kwargs": template_kwargs, "control": self._control}
        if isinstance(prompt, str) or (seen is None and not returned):
            return OpenedPrompt(prompt, encode_prompt(self._tokenizer, prompt, **how), None)
        bare_prompt = [{**message, "content": without_payload(message["content"])} for message in prompt]
        text = render_prompt(self._tokenizer, bare_prompt, where, template_kwargs, self._control)
        try:
            return OpenedPrompt(prompt, *shown_again(self._processor, text, seen, where, returned))
        except DataError as error:
            if not returned:
                raise
            raise OpeningFailed(str(error)) from error

    def _ids_around(
        self, marked: list[Message], marks: Sequence[str], parts: Sequence[str], template_kwargs: Mapping[str, Any]
    ) -> list[int]:
        """Return the tokens of a rendering in which each mark is replaced by a text that is tokenised apart."""
        settings = {"tokenize": False, "add_generation_prompt": True, **template_kwargs}
        text, ids = str(apply_chat_template(self._tokenizer, marked, **settings)), list[int]()
        for mark, part in zip(marks, parts):
            before, text = text.split(mark, 1)
            ids += [*self._tokenizer(before, add_special_tokens=False)["input_ids"]]
            ids += literal_ids(self._tokenizer, part)
        return [*ids, *self._tokenizer(text, add_special_tokens=False)["input_ids"]]


def _extends_last_message(opening: str | Sequence[Message]) -> bool:
    """Tell whether an opening goes on the end of the prompt's last message: a text, or parts, which have no role."""
    return isinstance(opening, str) or "role" not in opening[0]


def _contents(opening: str | Sequence[Message]) -> list[Content]:
    """Return the contents of the first observation, one a message."""
    if isinstance(opening, str):
        return [opening]
    return [list(opening)] if _extends_last_message(opening) else [message["content"] for message in opening]


def _with_texts(prompt: list[Message], opening: str | Sequence[Message], texts: Sequence[str]) -> list[Message]:
    """Return the messages with `texts` in the place of those of the first observation."""
    new, contents = iter(texts), list[Content]()
    for content in _contents(opening):
        contents.append(with_texts(content, [next(new) for _ in texts_of_content(content)]))
    if not _extends_last_message(opening):
        messages: Any = opening
        return [*prompt, *({**message, "content": content} for message, content in zip(messages, contents))]
    before, more = prompt[-1]["content"], contents[0]
    if not isinstance(more, str):
        whole: Content = [*([{"type": "text", "text": before}] if isinstance(before, str) else before), *more]
    elif isinstance(before, str):
        whole = f"{before}{more}"
    elif before[-1]["type"] == "text":
        whole = [*before[:-1], {**before[-1], "text": f"{before[-1]['text']}{more}"}]
    else:
        whole = [*before, {"type": "text", "text": more}]
    return [*prompt[:-1], {**prompt[-1], "content": whole}]


_SEED_BITS = 31
_MAX_PREPARED = 64
"""The number of different row arguments for which a prepared environment is cached."""


@dataclass(frozen=True)
class _PreparedKind:
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
        self._prepared = {name: self._prepare_kind(kind, {}) for name, kind in factory.kinds.items()}
        self._prepared_of_rows: dict[tuple[str, str], _PreparedKind] = {}
        """Prepared kinds of the latest rows with chat template arguments of their own, by the kind and these."""
        self._tools_of_rows = 0
        """Tokens of the longest tools of such a row."""
        self._codec = TurnCodec(tokenizer, eos_ids, processor, max_image_pixels)
        self._opener = PromptOpener(tokenizer, processor, self._codec.shorten, factory.max_observation_tokens)
        self._runner, self._logged = Runner(), set[str]()
        self._rewriting = TemplateRewriteCheck(tokenizer)

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
        return self._codec.max_image_pixels

    @property
    def parsers(self) -> dict[str, Parser | None]:
        """Parsers of tool calls, by the kind of environment; None where it has no tools."""
        return {name: ready.parser for name, ready in self._prepared.items()}

    # ------------------------------------------------------------------ lengths

    def lengths(self, longest: int) -> dict[str, int]:
        opens = any(ready.kind.opens for ready in self._prepared.values())
        return {
            "the longest prompt": longest,
            "the tools": max(self._tools_of_rows, *map(self._tool_tokens, self._prepared.values())),
            "env.max_observation_tokens": self.factory.max_observation_tokens if opens else 0,
            "env.max_tokens": self.factory.max_tokens,
        }

    def _tool_tokens(self, ready: _PreparedKind) -> int:
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
        of_group = [key for key in request.prompt_keys for _ in range(asked.group_size)]
        seeds = request.row_keys if self.factory.seed == "sample" else of_group
        journal = None
        if self.journal is not None and request.batch.rollout >= 0:  # validations are not journaled
            journal = self.journal.request(request.batch.rollout, request)
        with ExitStack() as closes:

            def begin_episodes() -> tuple[list[OpenedPrompt], Conversations]:
                opened, conversations = self.begin(
                    request.batch, seeds, max_new_tokens=sampling.max_new_tokens, journal=journal, seen=asked.vision
                )
                closes.enter_context(closing(conversations))
                return opened, conversations

            try:
                opened, conversations = request.agree(begin_episodes)
            except GenerationError:
                self.forget()  # a fixed environment must not replay a wrong beginning
                raise
            opened_prompts = replace(asked, token_ids=[each.ids for each in opened], responder=conversations)
            if any(each.seen is not None for each in opened):
                opened_prompts = replace(opened_prompts, vision=[each.seen for each in opened])
            completions = request.generate(opened_prompts, sampling)
            drawn = replace(completions, episodes=conversations.episodes())
            rollout = request.batch.rollout
            due = rollout >= 0 and rollout % CHECK_EVERY == 0  # validations are below 0
            if due and (frames := conversations.chat_frames):
                self._rewriting.check(drawn, frames)
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
        journals: list[EpisodeJournal | None] = [None] * len(seeds)
        if journal is not None:
            names = [(batch.rows[n // group], batch.occurrences[n // group], n % group) for n in range(len(seeds))]
            journals = [journal(*name, seed) for name, seed in zip(names, seeds)]
        rows = [self._row(batch, number // group, seed, journals[number]) for number, seed in enumerate(seeds)]
        conversations = Conversations(
            rows,
            self.factory,
            self._codec,
            max_new_tokens=max_new_tokens,
            runner=self._runner,
            logged=self._logged,
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

    def _row(self, batch: PromptBatch, number: int, seed: int, journal: EpisodeJournal | None) -> EpisodeRow:
        columns = {"prompt": batch.prompts[number], **{name: of[number] for name, of in batch.columns.items()}}
        ready = self.ready_for(columns)
        make: Callable[[], Environment] = partial(ready.kind.make, ready.parser)
        if self.factory.pool is not None or journal is not None:
            make = partial(ReplayableEnvironment, make, has_state=ready.kind.has_state, journal=journal)
        return EpisodeRow(make, ready.frames, seed & ((1 << _SEED_BITS) - 1), copy.deepcopy(columns))

    def _opened(
        self,
        batch: PromptBatch,
        number: int,
        seen: PromptVision | None,
        rows: Sequence[EpisodeRow],
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
        kwargs = self.template_kwargs(rows[0].columns)
        where = f"the prompt of row {batch.rows[number]}"
        opened = OpenedPrompt(batch.prompts[number], batch.prompt_ids[number], seen)
        if kwargs.get("tools"):
            opened = self._opener.render(opened.prompt, seen, where, kwargs)
        if opening is not None:
            try:
                opened = self._opener.with_opening(opened, opening, where, kwargs)
            except OpeningFailed as why:
                for row in rows:
                    row.end, row.error = "failed", str(why)
        for row in rows:
            row.prompt = opened.prompt
        return opened

    # ------------------------------------------------------------------ the tokenizer

    def template_kwargs(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**tools_argument(row.get("tools")), **self.ready_for(row).template_kwargs}

    def ready_for(self, columns: Mapping[str, Any]) -> _PreparedKind:
        """Return the kind of environment of a row, made ready for its own arguments of the chat template.

        Raises:
            ConfigError: with these the template cannot render what answers the policy.
        """
        kind, own = self.factory.kind_of(columns), row_template_kwargs(columns, "a row of env=") if self._chat else {}
        if not own:
            return self._prepared[kind]
        key = kind, json.dumps(own, sort_keys=True, default=str)
        ready = self._prepared_of_rows.pop(key, None)
        if ready is None:
            ready = self._prepare_kind(self.factory.kinds[kind], own)
            self._tools_of_rows = max(self._tools_of_rows, self._tool_tokens(ready))
            if len(self._prepared_of_rows) >= _MAX_PREPARED:
                del self._prepared_of_rows[next(iter(self._prepared_of_rows))]  # least recently used
        self._prepared_of_rows[key] = ready
        return ready

    def _prepare_kind(self, kind: EnvironmentKind, own: Mapping[str, Any]) -> _PreparedKind:
        chat, template_kwargs = self._chat, {**self._template_kwargs, **own}
        tools = kind.toolbox.schemas if kind.toolbox is not None else None
        parser = None
        if tools is not None:
            rendered_with = {**template_kwargs, "tools": tools} if chat else None
            parser = parser_for(self.factory.parser, self._tokenizer, tools, self.factory.call_pattern, rendered_with)
        if not chat:
            end = self._tokenizer.eos_token_id
            return _PreparedKind(kind, TextFrames(self._tokenizer, end), parser, {})
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
                check_tools_are_rendered(self._tokenizer, tools, settings)
        return _PreparedKind(kind, frames, parser, settings)
