"""Model output is not to be trusted: what is shown has no control characters and no markup of its own."""

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
    """Text of a prompt, a completion or a number; control characters as escapes, cut in the middle if too long."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        value = "\n".join(f"{message.get('role')}: {said(message.get('content'))}" for message in value)
    text = str(value)
    if len(text) > 2 * longest:  # escapes only lengthen: what is left out below is not looked at
        text = text[:longest] + text[-longest:]
    text = visible(text)
    if len(text) > longest:
        text = f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
    return text


def said(content: Any) -> Any:
    """What a message says; where it shows an image, that it does."""
    if not isinstance(content, list):
        return content
    return "".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)


def visible(text: str) -> str:
    """The text with its control characters as escapes, line ends left as they are."""
    if all(line.isprintable() for line in text.split("\n")):
        return text  # most are, and long ones take a hundred times as long character by character
    return "".join(
        char if char == "\n" or unicodedata.category(char)[0] != "C" else char.encode("unicode_escape").decode()
        for char in text
    )


def one_line(name: str) -> str:
    """A name of the user's, of a reward, a metric or a validation set, with line ends as escapes too."""
    return visible(name).replace("\n", "\\n")


def in_file_name(name: str) -> str:
    """The same as a part of a file's name."""
    return one_line(name).replace("/", "_")


def _mean_reward(rows: Sequence[dict[str, Any]]) -> float:
    """Over the rows that were scored; NaN marks the others."""
    scored = [row["reward"] for row in rows if not math.isnan(row["reward"])]
    return sum(scored) / len(scored) if scored else math.nan


def console_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """One line a row, green above and red below the mean reward of the rows shown; conversations by their authors."""
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
    """So that no line of a message looks like the next author's."""
    return printable(words).replace("\n", "\n  ")


def plan_table(rows: Sequence[tuple[str, str]]) -> None:
    """The batch arithmetic of a run."""
    table = Table(title="Batches", title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


_MARKUP = re.compile(r"[\\`*_\[\]|]")
"""What means something within a line of Markdown, besides HTML."""


def as_markdown(text: str) -> str:
    """The text as one line of Markdown that shows it as it is: no markup, no HTML, and no end of a table's cell."""
    return _MARKUP.sub(r"\\\g<0>", html.escape(one_line(text), quote=False))


def in_code_marks(text: str) -> str:
    """The text as one line of code in Markdown, in which nothing is rendered, and which reads well as a file too."""
    line = one_line(text).replace("`", "'") or " "  # two marks without anything between them would begin a code
    return f"`{line}`"


def markdown_table(rows: Sequence[dict[str, Any]], longest: int = LONGEST) -> str:
    """The rows as a Markdown table, its heads escaped, and every cell in code marks so that nothing in it is rendered.

    `longest`: characters of a cell, which is cut in the middle if it has more.
    """

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def cell(value: Any) -> str:
        return in_code_marks(printable(value, longest).replace("|", "\\|").replace("\n", " "))

    heads = (as_markdown(printable(name, longest)) for name in rows[0])
    return "\n".join([line(heads), "|" + "---|" * len(rows[0]), *(line(map(cell, row.values())) for row in rows)])


def html_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as an HTML table for a notebook, cells escaped; a row's colour is its `reward` against the mean."""
    middle = _mean_reward(rows)
    head = "".join(f"<th>{html.escape(one_line(name))}</th>" for name in rows[0])
    body = []
    for row in rows:
        hue = "#1a7f37" if row["reward"] > middle else "#cf222e" if row["reward"] < middle else "inherit"
        cells = "".join(f"<td><pre>{html.escape(printable(value))}</pre></td>" for value in row.values())
        body.append(f'<tr style="color: {hue}">{cells}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
