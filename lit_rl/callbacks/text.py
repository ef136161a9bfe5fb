"""Text for people. Model output is not to be trusted: it is shown without control characters and markup of its own."""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_rl.callbacks.conversation import Conversation

LONGEST = 200


def printable(value: Any, longest: int = LONGEST) -> str:
    """Return the text of a prompt, a completion or a number, control characters escaped, cut in the middle if too
    long."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        value = "\n".join(f"{message.get('role')}: {said(message.get('content'))}" for message in value)
    text = str(value)
    if len(text) > 2 * longest:  # escapes only lengthen: the part left out below need not be escaped
        text = text[:longest] + text[-longest:]
    text = visible(text)
    if len(text) > longest:
        text = f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
    return text


def said(content: Any) -> Any:
    """Return the text of a message's content, with a placeholder for each image."""
    if not isinstance(content, list):
        return content
    return "".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)


def visible(text: str) -> str:
    """Return the text with its control characters escaped, except line ends."""
    if all(line.isprintable() for line in text.split("\n")):
        return text  # most are, and the loop below is a hundred times slower
    return "".join(
        char if char == "\n" or unicodedata.category(char)[0] != "C" else char.encode("unicode_escape").decode()
        for char in text
    )


def one_line(name: str) -> str:
    """Return a user's name for a reward, a metric or a validation set, with line ends escaped too."""
    return visible(name).replace("\n", "\\n")


def in_file_name(name: str) -> str:
    """Return `one_line` of a name as part of a file name."""
    return one_line(name).replace("/", "_")


def _mean_reward(rows: Sequence[dict[str, Any]]) -> float:
    """Return the mean reward of the scored rows; NaN marks the others."""
    scored = [row["reward"] for row in rows if not math.isnan(row["reward"])]
    return sum(scored) / len(scored) if scored else math.nan


def console_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table, rows green above and red below their mean reward; conversations coloured by author."""
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
    if isinstance(value, Conversation):
        lines = (Text(f"{author}: {_indented(words)}", style=by) for author, words, by in value.lines())
        return Text("\n").join(lines)
    return Text(printable(value), style=style)


def _indented(words: str) -> str:
    """Indent the lines of a message, so that none looks like the next author's."""
    return printable(words).replace("\n", "\n  ")


def plan_table(rows: Sequence[tuple[str, str]]) -> None:
    """Print the batch arithmetic of a run."""
    table = Table(title="Batches", title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


_MARKUP = re.compile(r"[\\`*_\[\]|]")
"""Characters with a meaning within a line of Markdown, besides HTML."""


def as_markdown(text: str) -> str:
    """Return the text as one line of Markdown that shows it literally, without markup, HTML or the end of a cell."""
    return _MARKUP.sub(r"\\\g<0>", html.escape(one_line(text), quote=False))


def in_code_marks(text: str) -> str:
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
        return in_code_marks(printable(value, longest).replace("|", "\\|").replace("\n", " "))

    heads = (as_markdown(printable(name, longest)) for name in rows[0])
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
