"""The formats of data sets: a row is recognised from its columns and becomes a checked record.

Strings and conversations are checked, split and compared; rows that hold token ids already keep them.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_rl.core.episode import Message, Prompt
from lit_rl.core.errors import DataError, did_you_mean, excerpt
from lit_rl.core.visuals import Visual
from lit_rl.data.kinds import COLUMNS, USABLE, Kind, format_for, is_verdict, parse_verdict
from lit_rl.data.message_forms import parse_list, read_tools
from lit_rl.data.rendering import KWARGS_COLUMN, row_template_kwargs
from lit_rl.data.rows import add_system_prompt, check_message, is_blank, split_prompt

Text = str | list[Message]
"""A string, or chat messages."""


def check_conversation(value: Any, where: str, *, prompt: bool = False) -> Text:
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
    return [check_message(message, f"{where}: message {i}") for i, message in enumerate(value)]


def check_completions(
    prompt: Any, completions: Mapping[str, Any], where: str, system: str | None
) -> tuple[Prompt, tuple[Text, ...]]:
    """Return checked prompt and completions, all strings or all messages."""
    begin = check_conversation(prompt, f"{where}: prompt", prompt=True)
    texts = tuple(check_conversation(text, f"{where}: {name}") for name, text in completions.items())
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
    return add_system_prompt(messages, system), tuple(reply if isinstance(reply, list) else [] for reply in replies)


def is_whole(text: Text) -> bool:
    """Tell whether messages include the prompt: they do not begin with the assistant's."""
    return isinstance(text, list) and bool(text) and text[0]["role"] != "assistant"


def shared_messages(chosen: list[Message], rejected: list[Message]) -> int:
    """Return the number of leading messages that are the prompt of both: the common ones, up to an assistant's turn.

    0 where no prompt is left after which the assistant speaks in both.
    """
    count = _common_prefix(chosen[:-1], rejected[:-1])
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
    count = _common_prefix(chosen, rejected)
    if count == min(len(chosen), len(rejected)):
        while count and not chosen[count - 1].isspace():
            count -= 1
    elif any(
        0 < count < len(side) and _continues_word(side[count - 1]) and _continues_word(side[count])
        for side in (chosen, rejected)
    ):
        while count and _continues_word(chosen[count - 1]):
            count -= 1
    return count - 1 if count and chosen[count - 1] == " " else count


def _common_prefix(one: Any, other: Any) -> int:
    pairs = enumerate(zip(one, other))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _continues_word(character: str) -> bool:
    # Marks and joiners continue the character before them.
    return character.isalnum() or character in "_'\u2019\u200d" or unicodedata.category(character).startswith("M")


IGNORED = -100
"""The label of a token that is not learned."""

OTHER_MASKS = ("labels", "completion_mask", "assistant_masks", "attention_mask")
"""Columns beside `input_ids` that say which tokens are learned, or there at all."""


def masked_tokens(found: Mapping[str, Any], where: str, learn: str) -> tuple[list[int], list[bool]]:
    """Return the ids of a row, and the mask of those that are learned.

    `labels` (-100 where a token is not learned) settle it alone. Otherwise `all` learns every token; `completion` those
    that every mask given allows (`completion_mask`, `assistant_masks`), all where none is; `assistant` needs
    `assistant_masks`. Tokens whose `attention_mask` is 0 are padding, and are left out.

    Raises:
        DataError: a column is no list of integers as long as `input_ids`, labels are other tokens than the ids, or
            `assistant_masks` is missing.
    """
    ids = _integers(found, "input_ids", where, None)
    masks = {name: _integers(found, name, where, len(ids)) for name in OTHER_MASKS if name in found}
    for name, mask in masks.items():
        if name != "labels" and not set(mask) <= {0, 1}:
            raise DataError(f"{where}: {name} holds {excerpt(repr(mask))}; only 0 and 1 are allowed.")
    if min(ids, default=0) < 0:
        raise DataError(f"{where}: input_ids holds {min(ids)}; a token id is 0 or more.")
    if any(label not in (IGNORED, token) for label, token in zip(masks.get("labels", ()), ids)):
        raise DataError(f"{where}: labels holds other tokens than input_ids; each is the same token or {IGNORED}.")
    learned = _learned(masks, len(ids), learn, where)
    kept = masks.get("attention_mask", [1] * len(ids))
    return [t for t, keep in zip(ids, kept) if keep], [flag for flag, keep in zip(learned, kept) if keep]


def _learned(masks: Mapping[str, list[int]], size: int, learn: str, where: str) -> list[bool]:
    if "labels" in masks:
        return [label != IGNORED for label in masks["labels"]]
    if learn == "all":
        return [True] * size
    if learn == "assistant" and "assistant_masks" not in masks:
        raise DataError(
            f"{where}: data.learn=assistant needs the column assistant_masks beside input_ids (1 on tokens that the "
            "assistant wrote), or labels; without them set data.learn to completion or all."
        )
    masks_of_row = [masks[name] for name in ("completion_mask", "assistant_masks") if name in masks]
    return [all(mask[i] for mask in masks_of_row) for i in range(size)]


def _integers(found: Mapping[str, Any], name: str, where: str, size: int | None) -> list[int]:
    values = parse_list(found[name])
    whole = isinstance(values, list) and all(isinstance(value, int) for value in values)
    if not whole:
        raise DataError(f"{where}: {name} is {excerpt(repr(values))}; a list of integers is needed.")
    if size is not None and len(values) != size:
        raise DataError(f"{where}: {name} has {len(values)} values, input_ids has {size}; they must be as many.")
    return [int(value) for value in values]


@dataclass(frozen=True)
class ExampleRecord:
    """A row's content, before anything is tokenised."""

    format: str
    """Name of the format, for messages and reports."""
    prompt: Prompt | None = None
    completions: tuple[Text, ...] = ()
    """Texts after the prompt: one text; of a pair the chosen and the rejected one, of a triple the reference too; of
    labelled steps all steps. Strings where the prompt is a string, messages where it is messages; a whole text where
    the prompt is None."""
    columns: dict[str, Any] = field(default_factory=dict)
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """The row's own arguments of the chat template."""
    margin: float | None = None
    desirable: bool | None = None
    labels: tuple[bool, ...] = ()
    images: tuple[Visual, ...] = ()
    """Images and videos of the prompt."""
    tokens: tuple[list[int], list[bool]] | None = None
    """Rows that are tokenised already: ids, and which of them are learned."""

    @property
    def conversational(self) -> bool:
        return any(isinstance(part, list) for part in (self.prompt, *self.completions))


def read_record(
    row: Mapping[str, Any], where: str, kind: Kind, *, system_prompt: str | None = None, learn: str = "completion"
) -> ExampleRecord:
    """Return the row, recognised from its columns and checked. A column whose value is None counts as absent.

    Prompt and completions are strings or lists of messages; where only one of them is messages, the string becomes the
    user's (the assistant's) message. A pair without a prompt, or with a string prompt beside whole conversations, has
    an implicit one: what the two have in common (`shared_text`, `shared_messages`). `messages` split before the last
    message, which is the assistant's.

    Raises:
        DataError: columns of no format that serves the kind, or a value that its column does not allow. The message
            opens with `where` and names the columns found and needed.
    """
    found = {name: value for name, value in row.items() if value is not None}
    name = _recognise_format(found, where, kind)
    own = row_template_kwargs(found, where)
    if name == "tokenised":
        tokens = masked_tokens(found, where, learn)
        return ExampleRecord(name, columns=_rest(row, "input_ids", *OTHER_MASKS), tokens=tokens, template_kwargs=own)
    tools = read_tools(found.get("tools"), where)
    columns = {**_rest(row, *COLUMNS[name], "prompt"), **({"tools": tools} if "tools" in row else {})}
    columns |= {KWARGS_COLUMN: own or None} if KWARGS_COLUMN in row else {}
    more: dict[str, Any] = {"columns": columns, "tools": tools, "template_kwargs": own}
    if name in ("preference", "triple preference"):
        if kind == "pairs":
            more["margin"] = _margin(columns.pop("margin", None), f"{where}: margin")
        record = _preference(name, found, where, system_prompt, more)
    elif name.startswith("language"):
        record = _language(name, found, where, system_prompt, more)
    elif name == "stepwise":
        record = _stepwise(found, where, system_prompt, more)
    else:
        texts = {"completion": found["completion"]}
        prompt, completions = check_completions(found["prompt"], texts, where, system_prompt)
        desirable = _flag(found["label"], f"{where}: label") if name == "unpaired preference" else None
        record = ExampleRecord(_format_title(name, prompt), prompt, completions, desirable=desirable, **more)
    if tools and not record.conversational:
        raise DataError(f"{where}: the column tools came with plain text; tools need messages and a chat template.")
    return record


def _recognise_format(found: Mapping[str, Any], where: str, kind: Kind) -> str:
    name = format_for(found, kind)
    if name == "prompt-completion" and is_verdict(found):
        raise DataError(
            f"{where}: the columns {', '.join(found)} are those of unpaired preference: label says whether the "
            "completion is good, and this method imitates every text. Take a method that learns from verdicts, or keep "
            "only the good rows and give label another name with data.rename."
        )
    if name is not None:
        return name
    other = next((name for name, columns in COLUMNS.items() if all(column in found for column in columns)), None)
    what = f" (format {other})" if other else " (a prompt alone)" if "prompt" in found else ""
    # Nearest: of the formats that miss the fewest columns, misspelt ones aside, the one that has the most.
    lacks = {name: [column for column in COLUMNS[name] if column not in found] for name in USABLE[kind]}
    others = {name: [column for column in found if column not in COLUMNS[name]] for name in USABLE[kind]}
    nearest = min(
        lacks,
        key=lambda name: (
            sum(not did_you_mean(column, others[name]) for column in lacks[name]),
            len(lacks[name]),
            -len(COLUMNS[name]),
        ),
    )
    missing = lacks[nearest]
    hint = did_you_mean(missing[0], others[nearest])
    needed = " or ".join(dict.fromkeys(", ".join(COLUMNS[name]) for name in USABLE[kind]))
    raise DataError(
        f"{where}: columns found: {', '.join(found) or 'none'}{what}; a method that learns from {kind} needs the "
        f"columns {needed}. Nearest is {nearest}, which misses {', '.join(missing)}: name columns with data.rename, or "
        f"make them with data.map_row.{hint}"
    )


def _stepwise(found: Mapping[str, Any], where: str, system: str | None, more: dict[str, Any]) -> ExampleRecord:
    steps, flags = parse_list(found["completions"]), parse_list(found["labels"])
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise DataError(f"{where}: completions is {excerpt(repr(steps))}; a list of strings, one a step, is needed.")
    if not isinstance(flags, list) or len(flags) != len(steps):
        count = f"{len(flags)} labels" if isinstance(flags, list) else excerpt(repr(flags))
        raise DataError(f"{where}: labels must be a list of as many booleans as completions ({len(steps)}): {count}.")
    labels = tuple(_flag(flag, f"{where}: labels[{i}]") for i, flag in enumerate(flags))
    texts = tuple(check_conversation(step, f"{where}: completions[{i}]") for i, step in enumerate(steps))
    prompt = add_system_prompt(check_conversation(found["prompt"], f"{where}: prompt", prompt=True), system)
    return ExampleRecord(_format_title("stepwise", prompt), prompt, texts, labels=labels, **more)


def _language(
    name: str, found: Mapping[str, Any], where: str, system: str | None, more: dict[str, Any]
) -> ExampleRecord:
    column = COLUMNS[name][0]
    text = check_conversation(found[column], f"{where}: {column}")
    if isinstance(text, str) != (column == "text"):
        wanted = "a string" if column == "text" else "a list of chat messages"
        raise DataError(f"{where}: {column} is {excerpt(repr(text))}; it must be {wanted}.")
    if isinstance(text, list):
        messages = add_system_prompt(text, system)
        assert isinstance(messages, list)
        start = len(messages) - 1 if messages and messages[-1]["role"] == "assistant" else 0
        return ExampleRecord(name, messages[:start] or None, (messages[start:],), **more)
    if system is not None:
        raise DataError(
            f"{where}: data.system_prompt has no place in a text without a prompt: remove it, or give rows of "
            "messages, or of prompt and completion."
        )
    return ExampleRecord(name, None, (text,), **more)


def _preference(
    name: str, found: Mapping[str, Any], where: str, system: str | None, more: dict[str, Any]
) -> ExampleRecord:
    sides = {side: check_conversation(found[side], f"{where}: {side}") for side in COLUMNS[name]}
    chosen, rejected, *_ = sides.values()
    if len({type(text) for text in sides.values()}) > 1:
        *first, last = sides
        raise DataError(
            f"{where}: {', '.join(first)} and {last} are of two kinds: one is a string, one a list of messages."
        )
    if "prompt" in found and not (isinstance(found["prompt"], str) and all(map(is_whole, sides.values()))):
        prompt, texts = check_completions(found["prompt"], sides, where, system)
        return ExampleRecord(_format_title(name, prompt), prompt, texts, **more)
    if isinstance(chosen, list) and isinstance(rejected, list):
        count = shared_messages(chosen, rejected)
    else:
        count = shared_text(str(chosen), str(rejected))
    prompt: Prompt = chosen[:count]
    texts: tuple[Text, ...] = tuple(text[count:] for text in sides.values())
    if other := next((side for side, text in sides.items() if text[:count] != prompt), None):
        raise DataError(
            f"{where}: {other} does not begin with the prompt that chosen and rejected have in common. Give the column "
            "prompt, and completions without it."
        )
    titled = _format_title(f"{name} with implicit prompt", prompt)
    if system is not None and prompt:
        prompt, texts = as_messages(prompt, texts, system)
    return ExampleRecord(titled, prompt, texts, **more)


def _format_title(name: str, prompt: Prompt) -> str:
    return f"{name} ({'text' if isinstance(prompt, str) else 'messages'})"


def _rest(row: Mapping[str, Any], *used: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in used}


def _flag(value: Any, what: str) -> bool:
    """Return a truth value: a boolean, 0 or 1, or a word for it, because cells of .csv are text."""
    found = parse_verdict(value)
    if found is None:
        raise DataError(f"{what} is {excerpt(repr(value))}; true or false is needed (also 1 and 0, yes and no).")
    return found


def _margin(value: Any, what: str) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{what} is {excerpt(repr(value))}; a finite number is needed.")
    return number
