"""Prompts as their episodes begin: with tools, and with the first observation of the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lit_rl.chat_template import apply_chat_template
from lit_rl.data.image_prompts import Processor, Shown
from lit_rl.data.templates import control_tokens, encode_prompt, render_prompt
from lit_rl.environments.frames import literal_ids
from lit_rl.environments.observations import (
    Content,
    ImageReturned,
    bare,
    images_of_content,
    texts_of_content,
    with_texts,
)
from lit_rl.errors import ConfigError, DataError, GenerationError
from lit_rl.images import ImageRef
from lit_rl.rollout import Message, Prompt
from lit_rl.vision import PromptVision


class CannotBegin(Exception):
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
            _refuse_spelled_placeholders(tokenizer, processor)

    def told(self, plain: OpenedPrompt, where: str, template_kwargs: Mapping[str, Any]) -> OpenedPrompt:
        """Return the prompt of a row, rendered with its tools."""
        if not template_kwargs.get("tools"):
            return plain
        return self._rendered(plain.prompt, plain.seen, where, template_kwargs)

    def begun(
        self, plain: OpenedPrompt, opening: str | Sequence[Message], where: str, template_kwargs: Mapping[str, Any]
    ) -> OpenedPrompt:
        """Return the prompt with the first observation, in which control tokens are text.

        Args:
            plain: Told of its tools.
            opening: Goes on the end of the last message, or behind the messages.
            where: The prompt, for messages.
            template_kwargs: Arguments that it is rendered with.

        Raises:
            CannotBegin: the environment begins with too much, with a control token beside images, or with an image that
                the processor refuses.
            ImageReturned: it begins with an image, and the prompt is plain text.
        """
        found = self._with(plain, opening, where, template_kwargs)
        if len(found.ids) - len(plain.ids) > self._most:
            raise CannotBegin("what it began with is longer than env.max_observation_tokens")
        return found

    def _with(
        self, plain: OpenedPrompt, opening: str | Sequence[Message], where: str, template_kwargs: Mapping[str, Any]
    ) -> OpenedPrompt:
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
            return OpenedPrompt(prompt + text, [*plain.ids, *literal_ids(self._tokenizer, text)], None)
        opened = _with_texts(prompt, opening, parts)
        written = next((token for token in self._control for part in parts if token in part), None)
        if written is None:
            return self._rendered(opened, plain.seen, where, template_kwargs, images)
        if plain.seen is not None or images:  # a processor tokenises whole texts only
            raise CannotBegin(
                f"what it began with holds the text {written!r}, a control token of the policy, which a prompt with "
                "images cannot hold: let reset return other words"
            )
        marks = [f"qq{number}opening{number}qq" for number in range(len(parts))]
        marked = _with_texts(prompt, opening, marks)
        return OpenedPrompt(opened, self._ids_around(marked, marks, parts, template_kwargs), None)

    def _rendered(
        self,
        prompt: Prompt,
        seen: PromptVision | None,
        where: str,
        template_kwargs: Mapping[str, Any],
        given: tuple[ImageRef, ...] = (),
    ) -> OpenedPrompt:
        """Return the prompt as the policy reads it, with images of the first observation after those of the data."""
        how = {"where": where, "chat_template_kwargs": template_kwargs, "control": self._control}
        if isinstance(prompt, str) or (seen is None and not given):
            return OpenedPrompt(prompt, encode_prompt(self._tokenizer, prompt, **how), None)
        source = Shown("", (), where) if seen is None else seen.source
        if self._processor is None or not isinstance(source, Shown):
            raise GenerationError(
                f"{where} has pixels, and env= renders it anew: that takes the policy's processor and the images "
                "(PromptVision.source), which data modules give."
            )
        bare_prompt = [{**message, "content": bare(message["content"])} for message in prompt]
        text = render_prompt(self._tokenizer, bare_prompt, where, template_kwargs, self._control)
        shown = Shown(text, (*source.visuals, *given), where)
        try:
            ids, found = self._processor.process(text, shown.visuals, where)
        except DataError as error:
            if not given:
                raise
            raise CannotBegin(str(error)) from error
        if found is not None:
            found = replace(found, row=-1 if seen is None else seen.row, source=shown, from_environment=bool(given))
        return OpenedPrompt(prompt, ids, found)

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


def _is_end(opening: str | Sequence[Message]) -> bool:
    """Tell whether an opening goes on the end of the prompt's last message: a text, or parts, which have no role."""
    return isinstance(opening, str) or "role" not in opening[0]


def _contents(opening: str | Sequence[Message]) -> list[Content]:
    """Return the contents of the first observation, one a message."""
    if isinstance(opening, str):
        return [opening]
    return [list(opening)] if _is_end(opening) else [message["content"] for message in opening]


def _with_texts(prompt: list[Message], opening: str | Sequence[Message], texts: Sequence[str]) -> list[Message]:
    """Return the messages with `texts` in the place of those of the first observation."""
    new, contents = iter(texts), list[Content]()
    for content in _contents(opening):
        contents.append(with_texts(content, [next(new) for _ in texts_of_content(content)]))
    if _is_end(opening):
        return [*prompt[:-1], {**prompt[-1], "content": _ending(prompt[-1]["content"], contents[0])}]
    messages: Any = opening
    return [*prompt, *({**message, "content": content} for message, content in zip(messages, contents))]


def _ending(content: Content, more: Content) -> Content:
    """Return a message's content with more on its end."""
    if not isinstance(more, str):
        return [*([{"type": "text", "text": content}] if isinstance(content, str) else content), *more]
    text = more
    if isinstance(content, str):
        return f"{content}{text}"
    *others, last = content
    if last["type"] != "text":
        return [*content, {"type": "text", "text": text}]
    return [*others, {**last, "text": f"{last['text']}{text}"}]


def _refuse_spelled_placeholders(tokenizer: Any, processor: Processor) -> None:
    """Refuse a tokenizer that makes placeholders of plain text: replies of tools and environments may spell one."""
    for token in processor.placeholders:
        text = str(tokenizer.decode([token]))
        if token in literal_ids(tokenizer, text):
            raise ConfigError(
                f"env= lets others write texts for the policy, and its tokenizer makes a placeholder of an image of "
                f"{text!r} wherever it stands, since that is no special token of it. Mark it as special in the "
                "tokenizer's files, or leave env out."
            )
