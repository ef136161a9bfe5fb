"""Whole conversations through the chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lit_rl.chat_template import apply_chat_template
from lit_rl.data.checks import excerpt
from lit_rl.errors import ConfigError, DataError
from lit_rl.rollout import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str, kwargs: Mapping[str, Any], **how: Any
) -> Any:
    """The text of messages, or what `how` asks of `apply_chat_template` instead.

    Raises:
        DataError: the template refuses the messages. The message opens with `where`.
    """
    try:
        return apply_chat_template(tokenizer, messages, **{**kwargs, "tokenize": False, **how})
    except ConfigError:
        raise
    except Exception as error:  # a template is a program: whatever it raises, this row cannot be rendered by it
        raise DataError(f"{where}: the chat template refuses the messages: {excerpt(str(error), 200)}") from error


def marked_characters(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str, kwargs: Mapping[str, Any]
) -> list[bool]:
    """Return which characters of the rendered messages have a token between the template's generation markers.

    Raises:
        ConfigError: the template has none (transformers would mark no token, with a warning), or the tokenizer has no
            offsets.
    """
    template = tokenizer.chat_template
    if not GENERATION.search(" ".join(template.values()) if isinstance(template, dict) else str(template)):
        raise ConfigError(
            "data.learn=assistant needs a chat template that marks what the assistant says with {% generation %} and "
            "{% endgeneration %}, and this one has no such markers: give one with model.chat_template=FILE, or set "
            "data.learn=completion."
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"data.learn=assistant needs a tokenizer with offsets, which {type(tokenizer).__name__} lacks: set "
            "data.learn=completion."
        )
    marked = render(
        tokenizer,
        messages,
        where,
        kwargs,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    characters = [False] * max((end for _, end in marked["offset_mapping"]), default=0)
    for flag, (start, end) in zip(marked["assistant_masks"], marked["offset_mapping"]):
        if flag:
            characters[start:end] = [True] * (end - start)
    return characters


def tokens_with_places(
    tokenizer: PreTrainedTokenizerBase, parts: Sequence[str]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of parts that are tokenised apart, and where in all of them each token begins and ends."""
    ids: list[int] = []
    places: list[tuple[int, int]] = []
    place = 0
    for part in parts:
        encoding: Any = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True)
        ids += encoding["input_ids"]
        places += [(place + start, place + end) for start, end in encoding["offset_mapping"]]
        place += len(part)
    return ids, places


def borders_of_turns(
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[Message],
    completion: list[Message],
    whole: str,
    where: str,
    kwargs: Mapping[str, Any],
) -> list[int] | None:
    """Return where in a rendering the assistant's turns of a completion end and the next one begins, by turns.

    None: the template does not only append, so nobody can tell.
    """
    borders: list[int] = []
    speaks = True
    for i, message in enumerate(completion):
        if (message["role"] == "assistant") == speaks:
            continue
        speaks = not speaks
        try:
            text = render(tokenizer, [*prompt, *completion[:i]], where, kwargs, add_generation_prompt=speaks)
        except DataError:  # it refuses what would be a conversation that is not over yet
            return None
        if not whole.startswith(text) or (borders and len(text) < borders[-1]):
            return None
        borders.append(len(text))
    return borders


def check_prefix(begin: str, whole: str, where: str) -> None:
    """Check that a conversation begins with its prompt, so that the rest is the completion.

    Raises:
        DataError: the rendered conversation does not begin with the rendered prompt. The message shows where they part.
    """
    if whole.startswith(begin):
        return
    place = next((i for i, (mine, theirs) in enumerate(zip(begin, whole)) if mine != theirs), len(whole))
    alone, followed = (excerpt(text[max(0, place - 20) : place + 40]) for text in (begin, whole))
    raise DataError(
        f"{where}: the chat template renders the prompt differently when a completion follows: alone ...{alone!r}, "
        f"followed ...{followed!r}. So the completion has no place where it begins; templates that add or drop "
        "thinking blocks do this. Give a template that only appends with model.chat_template=FILE, try "
        "data.chat_template_kwargs (such as enable_thinking), or make the rows plain strings."
    )
