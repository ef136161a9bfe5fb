"""A row of a data set becomes a record: its format recognised from the columns, its parts checked and in one form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.data.kinds import COLUMNS, USABLE, Kind, format_for, is_verdict, verdict
from lit_rl.data.message_forms import list_of, read_tools
from lit_rl.data.offline.conversations import (
    Text,
    as_messages,
    conversation,
    is_whole,
    last_turn,
    shared_messages,
    shared_text,
    together,
    with_system,
)
from lit_rl.data.offline.tokenised import masked_tokens
from lit_rl.data.templates import OF_ROWS, kwargs_of_row
from lit_rl.errors import DataError, did_you_mean
from lit_rl.rollout import Prompt
from lit_rl.videos import Visual

OTHER_MASKS = ("labels", "completion_mask", "assistant_masks", "attention_mask")


@dataclass(frozen=True)
class Record:
    """A row's content, before anything is tokenised."""

    format: str
    """Name of the format, for messages and reports."""
    prompt: Prompt | None = None
    completions: tuple[Text, ...] = ()
    """Texts after the prompt: one text; of a pair the chosen and the rejected one; of labelled steps all steps. Strings
    where the prompt is a string, messages where it is messages; a whole text where the prompt is None."""
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
) -> Record:
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
    name = _recognised(found, where, kind)
    own = kwargs_of_row(found, where)
    if name == "tokenised":
        tokens = masked_tokens(found, where, learn)
        return Record(name, columns=_rest(row, "input_ids", *OTHER_MASKS), tokens=tokens, template_kwargs=own)
    tools = read_tools(found.get("tools"), where)
    columns = {**_rest(row, *COLUMNS[name], "prompt"), **({"tools": tools} if "tools" in row else {})}
    columns |= {OF_ROWS: own or None} if OF_ROWS in row else {}
    more: dict[str, Any] = {"columns": columns, "tools": tools, "template_kwargs": own}
    if name == "preference":
        if kind == "pairs":
            more["margin"] = _margin(columns.pop("margin", None), f"{where}: margin")
        record = _preference(found, where, system_prompt, more)
    elif name.startswith("language"):
        record = _language(name, found, where, system_prompt, more)
    else:
        record = _prompted(name, found, where, system_prompt, more)
    if tools and not record.conversational:
        raise DataError(f"{where}: the column tools came with plain text; tools need messages and a chat template.")
    return record


def _recognised(found: Mapping[str, Any], where: str, kind: Kind) -> str:
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
    nearest = min(lacks, key=lambda name: (_unlike(lacks[name], others[name]), len(lacks[name]), -len(COLUMNS[name])))
    missing = lacks[nearest]
    hint = did_you_mean(missing[0], others[nearest])
    needed = " or ".join(dict.fromkeys(", ".join(COLUMNS[name]) for name in USABLE[kind]))
    raise DataError(
        f"{where}: columns found: {', '.join(found) or 'none'}{what}; a method that learns from {kind} needs the "
        f"columns {needed}. Nearest is {nearest}, which misses {', '.join(missing)}: name columns with data.rename, or "
        f"make them with data.map_row.{hint}"
    )


def _unlike(missing: list[str], found: list[str]) -> int:
    return sum(not did_you_mean(column, found) for column in missing)


def _prompted(name: str, found: Mapping[str, Any], where: str, system: str | None, more: dict[str, Any]) -> Record:
    """Return the record of a row of prompt-completion, unpaired preference or labelled steps."""
    if name == "stepwise":
        return _stepwise(found, where, system, more)
    prompt, (completion,) = together(found["prompt"], {"completion": found["completion"]}, where, system)
    desirable = _flag(found["label"], f"{where}: label") if name == "unpaired preference" else None
    return Record(_titled(name, prompt), prompt, (completion,), desirable=desirable, **more)


def _stepwise(found: Mapping[str, Any], where: str, system: str | None, more: dict[str, Any]) -> Record:
    steps, flags = list_of(found["completions"]), list_of(found["labels"])
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise DataError(f"{where}: completions is {excerpt(repr(steps))}; a list of strings, one a step, is needed.")
    if not isinstance(flags, list) or len(flags) != len(steps):
        count = f"{len(flags)} labels" if isinstance(flags, list) else excerpt(repr(flags))
        raise DataError(f"{where}: labels must be a list of as many booleans as completions ({len(steps)}): {count}.")
    labels = tuple(_flag(flag, f"{where}: labels[{i}]") for i, flag in enumerate(flags))
    texts = tuple(conversation(step, f"{where}: completions[{i}]") for i, step in enumerate(steps))
    prompt = with_system(conversation(found["prompt"], f"{where}: prompt", prompt=True), system)
    return Record(_titled("stepwise", prompt), prompt, texts, labels=labels, **more)


def _language(name: str, found: Mapping[str, Any], where: str, system: str | None, more: dict[str, Any]) -> Record:
    column = COLUMNS[name][0]
    text = conversation(found[column], f"{where}: {column}")
    if isinstance(text, str) != (column == "text"):
        wanted = "a string" if column == "text" else "a list of chat messages"
        raise DataError(f"{where}: {column} is {excerpt(repr(text))}; it must be {wanted}.")
    if isinstance(text, list):
        prompt, completion = last_turn(with_system(text, system))
        return Record(name, prompt or None, (completion,), **more)
    if system is not None:
        raise DataError(
            f"{where}: data.system_prompt has no place in a text without a prompt: remove it, or give rows of "
            "messages, or of prompt and completion."
        )
    return Record(name, None, (text,), **more)


def _preference(found: Mapping[str, Any], where: str, system: str | None, more: dict[str, Any]) -> Record:
    sides = {name: conversation(found[name], f"{where}: {name}") for name in ("chosen", "rejected")}
    chosen, rejected = sides.values()
    if type(chosen) is not type(rejected):
        raise DataError(f"{where}: chosen and rejected are of two kinds: one is a string, one a list of messages.")
    if "prompt" in found and not (isinstance(found["prompt"], str) and is_whole(chosen) and is_whole(rejected)):
        prompt, texts = together(found["prompt"], sides, where, system)
        return Record(_titled("preference", prompt), prompt, texts, **more)
    if isinstance(chosen, list) and isinstance(rejected, list):
        count = shared_messages(chosen, rejected)
        prompt: Prompt = chosen[:count]
        texts: tuple[Text, ...] = (chosen[count:], rejected[count:])
    else:
        count = shared_text(str(chosen), str(rejected))
        prompt, texts = chosen[:count], (chosen[count:], rejected[count:])
    titled = _titled("preference with implicit prompt", prompt)
    if system is not None and prompt:
        prompt, texts = as_messages(prompt, texts, system)
    return Record(titled, prompt, texts, **more)


def _titled(name: str, prompt: Prompt) -> str:
    return f"{name} ({'text' if isinstance(prompt, str) else 'messages'})"


def _rest(row: Mapping[str, Any], *used: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in used}


def _flag(value: Any, what: str) -> bool:
    """Return a truth value: a boolean, 0 or 1, or a word for it, because cells of .csv are text."""
    found = verdict(value)
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
