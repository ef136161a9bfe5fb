"""The assistant's turns of a conversation: the training rows that teach them, and their places in one rendering.

A chat template may write a turn otherwise once the conversation goes on: without its thought, with another end, with
other blanks. `training_rows` then makes several rows of a conversation, so that each reply is learned once, behind what
the model reads when it writes that reply. `borders_of_turns` finds the turns in the rendering of the whole, for methods
that need one text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lit_rl.core.chat_template import THOUGHTS, common_prefix_length
from lit_rl.core.episode import Message
from lit_rl.core.errors import DataError
from lit_rl.data.rendering import PROBE_REPLY, check_prefix
from lit_rl.data.row_visuals import text_of
from lit_rl.data.rows import is_blank

RenderPart = Callable[..., str]
"""Renders some first messages of a conversation by the chat template; keywords are further arguments of the template.
Raises DataError where the template refuses them."""


@dataclass(frozen=True)
class LearnedTurn:
    """A reply of the assistant in a text."""

    number: int
    """Number of its message in the conversation."""
    begin: int
    """Offset up to which the model reads when it writes the reply."""
    end: int
    arguments: Mapping[str, Any]
    """Arguments of the template that it was rendered under, beside those of the run."""


@dataclass(frozen=True)
class TrainingRow:
    """A text with one or several of the assistant's turns; the last one ends it."""

    text: str
    turns: list[LearnedTurn]


def training_rows(
    render_part: RenderPart,
    messages: Sequence[Message],
    first: int,
    ends: Sequence[str],
    choices: Sequence[Mapping[str, Any]],
    where: str,
) -> list[TrainingRow]:
    """Return the rows that teach each reply of the assistant once; no row where it says nothing. Blank replies are read
    and not learned.

    A reply is learned behind the rendering of the messages before it with the generation prompt, as generation reads
    them, and in the form that the template gives it at the end of a conversation. It joins the row of the reply before
    where the text before it goes on from that row; otherwise it begins a row.

    Args:
        render_part: See `RenderPart`.
        messages: The conversation.
        first: Number of the first message that is learned.
        ends: Texts of the tokens at which generation ends.
        choices: Further arguments of the template, tried in this order where a reply does not continue the generation
            prompt under its defaults: a template that opens a thought writes a reply without one otherwise.
        where: The row of the data set, for messages.

    Raises:
        DataError: the template refuses some first messages; or it writes a reply otherwise than the model could, since
            it does not continue the generation prompt.
    """
    rows: list[TrainingRow] = []
    for number in range(first, len(messages)):
        if messages[number]["role"] != "assistant" or is_blank([messages[number]]):
            continue
        begin, whole, chosen = _reply_in_text(render_part, messages, number, choices, where)
        turn = LearnedTurn(number, len(begin), len(whole), chosen)
        before = rows[-1] if rows else TrainingRow("", [])
        kept = _up_to_end(before.text, ends)
        if kept and begin.startswith(kept):
            end = len(before.text) if begin.startswith(before.text) else len(kept)
            rows[-1] = TrainingRow(whole, [*before.turns[:-1], replace(before.turns[-1], end=end), turn])
        else:
            rows.append(TrainingRow(whole, [turn]))
    return rows


def _reply_in_text(
    render_part: RenderPart,
    messages: Sequence[Message],
    number: int,
    choices: Sequence[Mapping[str, Any]],
    where: str,
) -> tuple[str, str, Mapping[str, Any]]:
    """Return what the model reads before a reply, that text with the reply, and the arguments of the template."""
    before, past = messages[:number], messages[: number + 1]
    whole = render_part(past)
    if not before:
        return _before_first_reply(render_part, whole), whole, {}
    begin = render_part(before, add_generation_prompt=True)
    if whole.startswith(begin):
        return begin, whole, {}
    for chosen in choices:
        try:
            other = render_part(before, add_generation_prompt=True, **chosen)
            followed = render_part(past, **chosen)
        except DataError:  # the template refuses these arguments
            continue
        if followed.startswith(other):
            return other, followed, chosen
    written = _with_thought(begin, whole, messages[number]) or _behind_changed_history(
        render_part, messages, number, begin, whole
    )
    if written is not None:
        return begin, written, {}
    place = f"{where}: message {number} (assistant)"
    if opened := _OPENED.search(begin):
        raise DataError(
            f"{place}: the chat template opens every reply with {opened[0]!r}, and this reply has no thought. Give it "
            "one in reasoning_content, give a template that opens none with model.chat_template=FILE, or leave such "
            "rows out with data.on_bad_row=skip."
        )
    check_prefix(begin, whole, place)
    return begin, whole, {}


def _before_first_reply(render_part: RenderPart, whole: str) -> str:
    """Return what the template writes before the words of a conversation's first message, which is a reply: generation
    could not begin one, so the generation prompt is looked for behind a question."""
    asked: list[Message] = [{"role": "user", "content": PROBE_REPLY}]
    try:
        opening = render_part(asked, add_generation_prompt=True).removeprefix(render_part(asked))
    except DataError:  # the template refuses the question alone
        return ""
    before, found, _ = whole.partition(opening) if opening else ("", "", "")
    return before + found if found else ""


_OPENED = re.compile(r"<think>\s*\Z")


def _with_thought(begin: str, whole: str, message: Message) -> str | None:
    """Return what the model reads, with a reply whose thought the generation prompt opens and the template leaves out
    of every turn (DeepSeek-R1's does); None where that is not so."""
    opened = _OPENED.search(begin)
    if opened is None or not whole.startswith(begin[: opened.start()]):
        return None
    content = text_of(message["content"])
    thought = next((str(message[key]) for key in THOUGHTS if message.get(key)), "")
    if "</think>" in content:
        written = content.lstrip().removeprefix("<think>").lstrip("\n")
    elif thought:
        written = f"{thought.strip()}\n</think>\n\n{content}"
    else:
        return None
    answer, tail = written.rpartition("</think>")[2], whole[opened.start() :]
    for words in (answer, answer.strip()):
        if tail.startswith(words):
            return begin + written + tail[len(words) :]
    return None


def _behind_changed_history(
    render_part: RenderPart, messages: Sequence[Message], number: int, begin: str, whole: str
) -> str | None:
    """Return what the model reads, with its reply as the template writes it behind a history that the reply changes
    (gpt-oss' drops thoughts before calls once the answer is there); None where the reply's place is not certain."""
    try:
        before = render_part(messages[:number])
        probe = render_part([*messages[:number], {"role": "assistant", "content": PROBE_REPLY}])
    except DataError:  # the template refuses them
        return None
    opening = begin.removeprefix(before) if begin.startswith(before) else ""
    shared = whole[: common_prefix_length(whole, probe)]
    place = shared.rfind(opening) if opening else -1
    heard = text_of(messages[number - 1]["content"]).strip()
    fixed = shared[place + len(opening) :]  # what the template writes before every reply
    if place < 0 or (heard in fixed if heard else messages[number - 1]["role"] == "assistant"):
        return None
    return begin + whole[place + len(opening) :]


def _up_to_end(text: str, ends: Sequence[str]) -> str:
    """Return a text up to the first mark of the end of generation that closes it; without marks, without blanks."""
    kept = bare = text.rstrip()
    while mark := next((each for each in ends if each and bare.endswith(each)), ""):
        kept, bare = bare, bare.removesuffix(mark).rstrip()
    return kept


def borders_of_turns(
    render_part: RenderPart,
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
        render_part: See `RenderPart`.
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
    start = len(render_part(messages[:first], add_generation_prompt=True)) if first else 0
    for end_of_reply, next_turn in zip(turns[::2], [*turns[1::2], None]):
        try:
            alone = render_part(messages[:end_of_reply])
            begin = whole if next_turn is None else render_part(messages[:next_turn], add_generation_prompt=True)
        except DataError:  # it refuses a conversation that is not over yet
            return None
        if not whole.startswith(begin) or len(begin) < start:
            return None
        end = _end_of_turn(alone, whole[: len(begin)], start, control, ends)
        words = text_of(messages[end_of_reply]["content"]).strip()
        if end is None or (words and words in whole[start:end] and words not in alone[start:]):
            return None
        borders += [end] if next_turn is None else [end, len(begin)]
        start = len(begin)
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
