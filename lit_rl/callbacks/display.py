"""Prompts, completions and episodes for people: console, Markdown and HTML tables, conversations, thumbnails.

Model output is not to be trusted: nothing that is shown has control characters or markup of its own.
"""

from __future__ import annotations

import html
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_rl.core.episode import fork_lines, message_text, transcript_of
from lit_rl.core.visuals import THUMBNAIL, WHITE, Visual, pillow, shown_in

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.table import Column, Table
    from rich.text import Text


# ---------------------------------------------------------------------- episodes


MOST_MESSAGES = 12
"""Most messages of an episode that are shown, the first and the last half of them."""

STYLES = {"assistant": "cyan", "tool": "magenta", "user": "yellow"}
"""Colours by author; others have none."""


class ShownMessage(NamedTuple):
    """A message with its author, its text, and the colour of both."""

    author: str
    words: str
    style: str


@dataclass(frozen=True)
class ShownConversation:
    """The messages of an episode, with a flag for each turn in the loss."""

    messages: Sequence[Mapping[str, Any]]
    learned: Sequence[bool]
    """A truth value for each turn of the policy: is it in the loss."""
    forks: Sequence[Sequence[int | None]] = ()
    """See `lit_rl.core.episode.Episode.forks`."""

    def __str__(self) -> str:
        return transcript_of(self.messages, self.forks)

    def lines(self) -> list[ShownMessage]:
        """Return a line for each message, dim where it is not learned from, and marked so where the policy wrote it."""
        lines, turns, forks, number = [], iter(self.learned), fork_lines(self.forks), 0
        for message in self.messages:
            role = str(message["role"])
            style, by_policy = STYLES.get(role, ""), role == "assistant"
            if line := forks.pop(number, None):
                lines.append(ShownMessage("fork", f"turn {number} {line}", "dim"))
            number += by_policy
            if by_policy and next(turns, True):
                lines.append(ShownMessage(role, message_text(message), style))
            else:
                author = f"{role} (not learned)" if by_policy else role
                lines.append(ShownMessage(author, message_text(message), f"dim {style}".strip()))
        if len(lines) <= MOST_MESSAGES:
            return lines
        left_out = ShownMessage("...", f"{len(lines) - MOST_MESSAGES} messages more", "dim")
        return [*lines[: MOST_MESSAGES // 2], left_out, *lines[-MOST_MESSAGES // 2 :]]


def conversation_of(table: Mapping[str, Sequence[Any]], row: int) -> ShownConversation:
    """Return the episode in a row of a table of samples, with its turns in the loss."""
    turn, learned = table["tokens/turn"][row], table["tokens/learned"][row]
    return ShownConversation(
        json.loads(table["messages"][row]),
        [bool(learned[turn == i].any()) for i in range(table["turns"][row])],
        json.loads(table["forks"][row]) if "forks" in table else (),
    )


# ---------------------------------------------------------------------- images


@dataclass(frozen=True)
class Pictures:
    """The images of a row, then its videos as their first frames. Files are opened at first use."""

    refs: tuple[Visual, ...]

    @classmethod
    def of(cls, table: Mapping[str, Sequence[Any]], row: int) -> Pictures:
        """Return the pictures in a row of a table of samples."""
        return cls(shown_in(table, row))

    def __str__(self) -> str:
        """Return a line for each: the file, or the origin of the bytes and the start of their digest."""
        return "\n".join(ref.name if ref.path is not None else f"{ref.name} {ref.digest[:8]}" for ref in self.refs)

    def strip(self) -> Image | None:
        """Return thumbnails side by side on white, mode RGB; None where there are none.

        Raises:
            DataError: an image cannot be read.
        """
        small = [ref.thumbnail() for ref in self.refs]
        if len(small) < 2:
            return small[0] if small else None
        width, height = sum(image.width for image in small), max(image.height for image in small)
        strip, left = pillow().new("RGB", (width + _GAP * (len(small) - 1), height), WHITE), 0
        for image in small:
            strip.paste(image, (left, 0))
            left += image.width + _GAP
        return strip


_GAP = THUMBNAIL // 24


# ---------------------------------------------------------------------- text


LONGEST = 200


def printable(value: Any, longest: int = LONGEST) -> str:
    """Return a prompt, a completion or a number as text, control characters escaped, cut in the middle if long."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        value = "\n".join(f"{message.get('role')}: {content_text(message.get('content'))}" for message in value)
    text = str(value)
    if len(text) > 2 * longest:  # escapes only lengthen: the part left out below need not be escaped
        text = text[:longest] + text[-longest:]
    text = escape_control(text)
    if len(text) > longest:
        text = f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
    return text


def content_text(content: Any) -> Any:
    """Return the text of a message's content, with a placeholder for each image."""
    if not isinstance(content, list):
        return content
    return "".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)


def escape_control(text: str) -> str:
    """Return the text with its control characters escaped, except line ends."""
    if all(line.isprintable() for line in text.split("\n")):
        return text  # most are, and what follows is slower
    odd = (char for char in {*text} - {"\n"} if unicodedata.category(char)[0] == "C")
    return text.translate({ord(char): char.encode("unicode_escape").decode() for char in odd})


def one_line(name: str) -> str:
    """Return a user's name for a reward, a metric or a validation set, with line ends escaped too."""
    return escape_control(name).replace("\n", "\\n")


def file_name_part(name: str) -> str:
    """Return `one_line` of a name as part of a file name."""
    return one_line(name).replace("/", "_")


# ---------------------------------------------------------------------- tables


def ruled_table(title: str | Text, columns: Iterable[Column]) -> Table:
    """Return a console table for the numbers of a report: a rule under its heads, and no frame. Rows are added to it.

    Args:
        title: Title, on the left; a `str` may hold rich's markup.
        columns: Columns with their heads.
    """
    from rich import box  # rich is imported where it prints: a refusal of a command does not wait for it
    from rich.table import Table

    return Table(
        *columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )


def _mean_reward(rows: Sequence[dict[str, Any]]) -> float:
    """Return the mean reward of the scored rows; NaN marks the others."""
    scored = [row["reward"] for row in rows if not math.isnan(row["reward"])]
    return sum(scored) / len(scored) if scored else math.nan


def console_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table, rows green above and red below their mean reward; conversations coloured by author."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    middle = _mean_reward(rows)
    table = Table(title=title, title_justify="left", show_lines=len(rows) < 3)
    for name in rows[0]:
        number = isinstance(rows[0][name], float)
        table.add_column(Text(one_line(name)), justify="right" if number else "left", overflow="fold")
    for row in rows:
        style = "green" if row["reward"] > middle else "red" if row["reward"] < middle else ""
        table.add_row(*(_cell(value, style) for value in row.values()))
    Console().print(table)


def _cell(value: Any, style: str) -> Text:
    from rich.text import Text

    if not isinstance(value, ShownConversation):
        return Text(printable(value), style=style)
    messages = ((f"{author}: {printable(words)}", by) for author, words, by in value.lines())
    # Indented, so that no line of a message looks like the next author's.
    return Text("\n").join(Text(message.replace("\n", "\n  "), style=by) for message, by in messages)


def plan_table(rows: Sequence[tuple[str, str]]) -> None:
    """Print the batch arithmetic of a run."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Batches", title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


_MARKUP = re.compile(r"[\\`*_\[\]|]")
"""Characters with a meaning within a line of Markdown, besides HTML."""


def escape_markdown(text: str) -> str:
    """Return the text as one line of Markdown that shows it literally, without markup, HTML or the end of a cell."""
    return _MARKUP.sub(r"\\\g<0>", html.escape(one_line(text), quote=False))


def markdown_code(text: str) -> str:
    """Return the text as one line of Markdown code, in which nothing is rendered."""
    line = one_line(text).replace("`", "'") or " "  # two backticks with nothing between them would open a code span
    return f"`{line}`"


def markdown_table(rows: Sequence[dict[str, Any]], longest: int = LONGEST) -> str:
    """Return the rows as a Markdown table with escaped heads, and cells as code, so that nothing in them is rendered.

    Args:
        rows: By column name.
        longest: Characters of a cell, which is cut in the middle if it has more.
    """

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def cell(value: Any) -> str:
        return markdown_code(printable(value, longest).replace("|", "\\|").replace("\n", " "))

    heads = (escape_markdown(printable(name, longest)) for name in rows[0])
    return "\n".join([line(heads), "|" + "---|" * len(rows[0]), *(line(map(cell, row.values())) for row in rows)])


def html_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as an HTML table with escaped cells, coloured by `reward` against the mean, for a notebook."""
    middle = _mean_reward(rows)
    head = "".join(f"<th>{html.escape(one_line(name))}</th>" for name in rows[0])
    body = []
    for row in rows:
        hue = "#1a7f37" if row["reward"] > middle else "#cf222e" if row["reward"] < middle else "inherit"
        cells = "".join(f"<td><pre>{html.escape(printable(value))}</pre></td>" for value in row.values())
        body.append(f'<tr style="color: {hue}">{cells}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
