"""Whole conversations through the chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lit_rl.chat_template import apply_chat_template
from lit_rl.data.checks import excerpt
from lit_rl.data.image_parts import text_of
from lit_rl.errors import ConfigError, DataError
from lit_rl.rollout import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str, kwargs: Mapping[str, Any], **how: Any
) -> Any:
    """Return the rendered text of messages, or the value of `apply_chat_template` that `how` requests instead.

    Raises:
        DataError: the template refuses the messages. The message opens with `where`.
    """
    try:
        return apply_chat_template(tokenizer, messages, **{**kwargs, "tokenize": False, **how})
    except ConfigError:
        raise
    except Exception as error:  # a template may raise anything
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
    """Return token ids of parts that are tokenised apart, with the span of each token in all of them."""
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
    render_whole: Callable[..., str],
    messages: Sequence[Message],
    first: int,
    whole: str,
    control: Sequence[str],
    ends: Sequence[str],
) -> list[int] | None:
    """Return where in a rendering the assistant's turns of a completion end and the next one begins, by turns.

    A turn begins where the generation prompt of what stands before it ends. It ends where the template ends the
    conversation up to there. Templates write the last turn otherwise than others: with another control token, before
    which it ends then; or with a thought, and then it ends with its first control token at which generation ends.

    Args:
        render_whole: Renders messages, by the template and its arguments.
        messages: Messages of the prompt and the completion.
        first: The number of the completion's first message, the assistant's.
        whole: Rendering of all messages.
        control: The texts of control tokens.
        ends: Control tokens at which generation ends.

    Returns:
        None where a turn is written otherwise when the conversation goes on: its end is unknown.
    """
    speakers = ["assistant" if message["role"] == "assistant" else "" for message in messages]
    turns = [i for i in range(first + 1, len(messages)) if speakers[i] != speakers[i - 1]]
    borders: list[int] = []
    at = len(render_whole(messages[:first], add_generation_prompt=True)) if first else 0
    for over, again in zip(turns[::2], [*turns[1::2], None]):
        try:
            alone = render_whole(messages[:over])
            begin = whole if again is None else render_whole(messages[:again], add_generation_prompt=True)
        except DataError:  # it refuses a conversation that is not over yet
            return None
        if not whole.startswith(begin) or len(begin) < at:
            return None
        end = _end_of_turn(alone, whole[: len(begin)], at, control, ends)
        heard = text_of(messages[over]["content"]).strip()
        if end is None or (heard and heard in whole[at:end] and heard not in alone[at:]):
            return None
        borders += [end] if again is None else [end, len(begin)]
        at = len(begin)
    return borders


def _end_of_turn(alone: str, text: str, at: int, control: Sequence[str], ends: Sequence[str]) -> int | None:
    """Return the place where a turn ends that begins at a place of a text: see `borders_of_turns`."""
    if text.startswith(alone) and len(alone) >= at:
        return len(alone)
    while mark := next((each for each in control if alone.rstrip().endswith(each)), ""):
        alone = alone.rstrip().removesuffix(mark)
        if text.startswith(alone) and len(alone) > at:
            return len(alone)
    places = [text.find(end, at) + len(end) for end in ends if text.find(end, at) >= 0]
    return min(places, default=None)


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
